"""The packed model against Hugging Face's forward of one sequence at a time, the head against a
naive softmax, loading against the file, and the refusal of everything for which the packed forward
was not shown to be right."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
)
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeAttention, Qwen2MoeConfig

import tiny
from harness import ranks
from minirl.base.errors import UserError
from minirl.batch import attention_plan
from minirl.batch.attention_plan import RowLayout
from minirl.batch.packing import pack
from minirl.config.policy import PolicyConfig, ScratchConfig
from minirl.data import chat
from minirl.data.chat import to_messages
from minirl.data.examples import encode_chat
from minirl.data.tokenizer import load_tokenizer, stop_token_ids
from minirl.model import (
    attention,
    build,
    checks,
    loading,
    logprob,
    scratch,
)
from minirl.parallel import sharding
from minirl.train.policy import Policy
from test_packing import groups, seen

CPU = torch.device("cpu")

# --------------------------------------------------------------------------------------------------
# log-probs and entropy


def naive(hidden, weight, targets, temperature, softcap=None):
    logits = hidden @ weight.t()
    logp = torch.log_softmax(
        (logits if softcap is None else torch.tanh(logits / softcap) * softcap) / temperature, dim=1
    )
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(1)


def head_inputs(num, dtype=torch.float64):
    rng = torch.Generator().manual_seed(num)
    hidden, weight = (
        torch.randn(n, 8, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()
        for n in (num, 37)
    )
    return (
        hidden,
        weight,
        torch.randint(37, (num,), generator=rng),
        torch.randn(2, num, generator=rng, dtype=torch.float64),
    )


@pytest.mark.parametrize(
    "chunk_bytes", [1, 37 * 8 * 20, 2**26], ids=["chunks of 16", "chunks of 20", "one chunk"]
)
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("softcap", [None, 2.5])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_logprobs_and_entropy_equal_a_naive_softmax_with_gradients(
    monkeypatch, chunk_bytes, temperature, softcap, entropy_gradient
):
    monkeypatch.setitem(logprob.CHUNK_BYTES, "cpu", chunk_bytes)
    hidden, weight, targets, (a, b) = head_inputs(53)
    got = logprob.logprob_entropy(
        hidden, weight, targets, temperature, softcap=softcap, entropy_gradient=entropy_gradient
    )
    expected = naive(hidden, weight, targets, temperature, softcap)
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-10)
    loss = (got[0] * a).sum() + (got[1] * b).sum()
    wanted = (expected[0] * a).sum() + (expected[1] * b).sum() * entropy_gradient
    for x, y in zip(
        torch.autograd.grad(loss, (hidden, weight)),
        torch.autograd.grad(wanted, (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-10)


def test_entropy_has_a_gradient_only_on_request():
    hidden, weight, targets, (_, b) = head_inputs(20)
    assert not logprob.logprob_entropy(hidden, weight, targets)[1].requires_grad
    entropy = logprob.logprob_entropy(hidden, weight, targets, entropy_gradient=True)[1]
    # Without the log-probs, whose gradient is then None.
    got = torch.autograd.grad((entropy * b).sum(), (hidden, weight))
    expected = torch.autograd.grad(
        (naive(hidden, weight, targets, 1.0)[1] * b).sum(), (hidden, weight)
    )
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-10)


def test_no_rows_give_no_logprobs_and_zero_gradients():
    """A rank without work runs the head on nothing, and still gives FSDP a gradient."""
    hidden, weight, targets, _ = head_inputs(0)
    logprobs, entropy = logprob.logprob_entropy(hidden, weight, targets, entropy_gradient=True)
    assert logprobs.shape == entropy.shape == (0,)
    grads = torch.autograd.grad(logprobs.sum() + entropy.sum(), (hidden, weight))
    assert [g.shape for g in grads] == [(0, 8), (37, 8)]
    assert not grads[1].any()


def test_bf16_inputs_give_float32_logprobs_and_gradients_in_their_own_dtype():
    hidden, weight, targets, _ = head_inputs(30, torch.bfloat16)
    logprobs, entropy = logprob.logprob_entropy(hidden, weight, targets)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(
        logprobs.double(),
        naive(hidden.double(), weight.double(), targets, 1.0)[0],
        rtol=0,
        atol=0.05,
    )
    assert [g.dtype for g in torch.autograd.grad(logprobs.sum(), (hidden, weight))] == [
        torch.bfloat16
    ] * 2


# --------------------------------------------------------------------------------------------------
# attention

PROMPTS_SHARED = [(14, [3, 9, 22]), (2, [5, 2]), (1, [7, 3]), (20, [6, 1])]
PROMPTS_ALONE = [(14, [3]), (5, [22]), (2, [5]), (1, [9]), (9, [1]), (20, [6])]


def naive_attention(q, k, v, sinks, batch, window, softcap):
    """One query at a time, float64; q [1, H, T, D], k and v [1, H / 2, T, D]. Sinks [H] are scores
    of one more key, whose share of the softmax is dropped."""
    out = torch.zeros_like(q)
    for row, keys in seen(batch):
        keys = keys[-window:] if window else keys
        for head in range(q.shape[1]):
            scores = k[0, head // 2, keys] @ q[0, head, row] * 0.3
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            if sinks is not None:
                scores = torch.cat([scores, sinks[head : head + 1]])
            shares = torch.softmax(scores, dim=0)[: len(keys)]
            out[0, head, row] = shares @ v[0, head // 2, keys]
    return out.transpose(1, 2)


@pytest.mark.parametrize("spec", [PROMPTS_SHARED, PROMPTS_ALONE], ids=["shared", "alone"])
@pytest.mark.parametrize("window", [None, 1, 7, 30, 4096])
@pytest.mark.parametrize("extra", ["", "softcap", "sinks"])
@pytest.mark.parametrize("short", [128, 10])
def test_packed_attention_equals_one_query_at_a_time(monkeypatch, spec, window, extra, short):
    monkeypatch.setattr(attention_plan, "SHORT_PROMPT", short)
    batch = pack(groups(spec), CPU, layout=RowLayout(windowed=window is not None))
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, len(batch.inputs), 6, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    )
    softcap = 0.7 if extra == "softcap" else None
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True) if extra == "sinks" else None
    out, _ = attention.packed_attention(
        torch.nn.Identity(),
        q,
        k,
        v,
        None,
        pack=batch,
        scaling=0.3,
        sliding_window=window,
        softcap=softcap,
        s_aux=sinks,
    )
    expected = naive_attention(q, k, v, sinks, batch, window, softcap)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    direction = torch.randn_like(out)
    inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
    got, wanted = (torch.autograd.grad((x * direction).sum(), inputs) for x in (out, expected))
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-11)


@pytest.mark.parametrize("spec", [PROMPTS_SHARED, PROMPTS_ALONE], ids=["shared", "alone"])
@pytest.mark.parametrize("window", [None, 7])
def test_kernels_agree(monkeypatch, spec, window):
    """torch's kernel for CPU and the formula, in float32 and bfloat16, forward and backward."""
    monkeypatch.setattr(attention_plan, "SHORT_PROMPT", 10)
    batch = pack(groups(spec), CPU, layout=RowLayout(windowed=window is not None))
    torch.manual_seed(0)
    inputs = [torch.randn(1, heads, len(batch.inputs), 6) for heads in (4, 2, 2)]
    direction = torch.randn(1, len(batch.inputs), 4, 6)

    def run(dtype):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out, _ = attention.packed_attention(
            torch.nn.Identity(), *leaves, None, pack=batch, sliding_window=window
        )
        assert out.dtype == dtype
        return out, *torch.autograd.grad((out * direction.to(dtype)).sum(), leaves)

    fast = [run(dtype) for dtype in (torch.float32, torch.bfloat16)]
    monkeypatch.setattr(attention, "_cpu_can", lambda q, options: False)
    for results, dtype, tolerance in zip(
        fast, (torch.float32, torch.bfloat16), (1e-5, 0.04), strict=True
    ):
        for x, y in zip(results, run(dtype), strict=True):
            assert (x.double() - y.double()).abs().max() < tolerance * y.double().abs().max()


def test_a_window_without_its_block_is_refused():
    batch = pack(groups(PROMPTS_ALONE), CPU)
    q = torch.zeros(1, 2, len(batch.inputs), 4)
    with pytest.raises(NotImplementedError, match="windowed=True"):
        attention.packed_attention(torch.nn.Identity(), q, q, q, None, pack=batch, sliding_window=4)


def test_a_window_that_a_layer_does_not_pass_is_refused():
    """As Qwen2MoE's, which counts on its mask. Exaone 4 passes None where a layer sees all."""
    batch = pack(groups(PROMPTS_ALONE), CPU)
    q = torch.zeros(1, 2, len(batch.inputs), 4)
    windowed = {"use_sliding_window": True, "max_window_layers": 1, "num_hidden_layers": 1}
    layer = Qwen2MoeAttention(Qwen2MoeConfig(**windowed), 0)
    with pytest.raises(NotImplementedError, match="Qwen2MoeAttention has a sliding window of 4096"):
        attention.packed_attention(layer, q, q, q, None, pack=batch)
    attention.packed_attention(layer, q, q, q, None, pack=batch, sliding_window=None)


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"sinks": torch.zeros(2)}, "sinks"),
        ({"is_causal": False}, "is_causal=False"),
        ({"dropout": 0.1}, "dropout"),
        ({"attention_mask": torch.ones(1)}, "mask"),
    ],
)
def test_attention_arguments_that_would_be_ignored_are_refused(asked, named):
    batch = pack(groups([(2, [3])]), CPU)
    q = torch.zeros(1, 2, len(batch.inputs), 4)
    mask = asked.pop("attention_mask", None)
    with pytest.raises(NotImplementedError, match=named):
        attention.packed_attention(torch.nn.Identity(), q, q, q, mask, pack=batch, **asked)
    attention.packed_attention(
        torch.nn.Identity(), q, q, q, None, pack=batch, is_causal=True, s_aux=None
    )  # neither of these asks for anything


# --------------------------------------------------------------------------------------------------
# whole models

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    name: (name, {}) for name in ("llama", "mistral", "qwen2", "qwen3", "smollm3")
} | {  # all families: test_families.py
    "tied": ("llama", {"tied": True, "attention_dropout": 0.5}),
    "llama3 rope, biases": (
        "llama",
        {"rope_parameters": LLAMA3_ROPE, "attention_bias": True, "mlp_bias": True},
    ),
    "every second layer a window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
}


def model_batch(shared):
    trajectories = groups(PROMPTS_SHARED if shared else PROMPTS_ALONE, seed=1)
    for t in trajectories:
        t.tokens = (t.tokens % 250 + 5).astype(np.int32)
    return trajectories


def weights_of(t):
    """What the test's loss multiplies log-prob and entropy of each token of a trajectory by: a
    function of its content alone."""
    rng = np.random.default_rng([len(t.tokens), int(t.tokens[-1])])
    return torch.tensor(rng.normal(size=(2, len(t.tokens))))


def exact_norm(self, x):
    """The library's norms round to float32 inside, even in a float64 model; a difference of 1e-16
    in front of that can flip it."""
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


def hugging_face(model, trajectories, temperature, images=None):
    """Log-probs and entropies of every sampled token, and the gradients, by the library's own
    forward of one sequence at a time. `images`: what it is given more for a trajectory."""
    values, loss = {}, 0.0
    for t in trajectories:
        tokens = torch.tensor(t.tokens, dtype=torch.int64)
        logits = model(tokens[None, :-1], **(images(t) if images else {})).logits[0]
        logp = torch.log_softmax(logits / temperature, dim=1)
        logprobs = logp.gather(1, tokens[1:, None])[:, 0]
        entropy = -(logp.exp() * logp).sum(1)
        sampled = torch.tensor(t.sampled[1:])
        w = weights_of(t)[:, 1:]
        loss = loss + (logprobs * w[0] + entropy * w[1])[sampled].sum()
        for i in sampled.nonzero()[:, 0].tolist():
            values[t.group, t.episode, i] = (logprobs[i].item(), entropy[i].item())
    model.zero_grad()
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if not n.startswith(build.NEVER_RUN)}
    return values, {n: grad.clone() for n, grad in grads.items()}


def packed(policy, trajectories, temperature):
    """The same through one packed batch. A mark in the place of the engine's log-prob says which
    row is which token."""
    marks = {}
    for t in trajectories:
        t.logprobs = np.zeros(len(t.tokens), np.float32)
        for i in np.flatnonzero(t.sampled):
            marks[len(marks) + 1] = (t, i - 1)
            t.logprobs[i] = len(marks)
    batch = pack(trajectories, CPU, temperature, layout=policy.layout)
    logprobs, entropy = policy.model(batch, True)
    row_of = {int(mark): row for row, mark in enumerate(batch.engine_logprobs.tolist()) if mark}
    loss = 0.0
    for mark, (t, i) in marks.items():
        w = weights_of(t)[:, i + 1]
        loss = loss + logprobs[row_of[mark]] * w[0] + entropy[row_of[mark]] * w[1]
    loss.backward()
    grads = {n: p.grad.full_tensor() for n, p in policy.shards().items()}
    policy.model.zero_grad()
    assert not logprobs[~batch.loss_mask].any()
    assert not entropy[~batch.loss_mask].any()
    policy.annotate([[batch]], "old_logprobs")
    assert (batch.old_logprobs - logprobs).abs().max() < 1e-5
    return {
        (t.group, t.episode, i): (logprobs[row_of[m]].item(), entropy[row_of[m]].item())
        for m, (t, i) in marks.items()
    }, grads


def compare(mesh, folder):
    """{(dtype, shared prompts, activation checkpointing): (worst log-prob, worst entropy, worst
    relative gradient, its parameter)}"""
    out = {}
    for dtype in ("float32", "float64"):
        # Eager's softmax is float32 in a float64 model, too.
        kernel = "eager" if dtype == "float32" else "sdpa"
        oracle = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=kernel
        ).eval()
        if dtype == "float64":
            for norm in {type(m) for m in oracle.modules() if type(m).__name__.endswith("RMSNorm")}:
                norm.forward = exact_norm  # of the packed model, too
        for shared in (True, False):
            expected, wanted = hugging_face(oracle, model_batch(shared), 0.8)
            for checkpointing in ("off", "selective", "full"):
                policy = Policy(
                    PolicyConfig(
                        model=str(folder), dtype=dtype, activation_checkpointing=checkpointing
                    ),
                    folder,
                    mesh,
                )
                got, grads = packed(policy, model_batch(shared), 0.8)
                assert got.keys() == expected.keys()
                assert grads.keys() == wanted.keys()
                got_values = np.array([got[key] for key in expected])
                differences = np.abs(got_values - np.array(list(expected.values()))).max(0)
                relative = {}
                for n, gradient in wanted.items():
                    difference = (grads[n] - gradient).abs().max()
                    relative[n] = (difference / gradient.abs().max()).item()
                worst = max(relative, key=relative.get)
                out[dtype, shared, checkpointing] = (*differences.tolist(), relative[worst], worst)
    return out


# The library's own float32 forward is up to 5e-6 from its float64 one on these models; float64
# shows that nothing but rounding differs.
TOLERANCES = {"float32": (6e-6, 1e-5), "float64": (1e-12, 1e-11)}


@pytest.mark.parametrize("name", MODELS)
def test_packed_forward_and_gradients_equal_hugging_face(tmp_path, name):
    family, config = MODELS[name]
    folder = tiny.make(tmp_path / "model", family, **config)
    (results,) = ranks(1, compare, folder)
    assert len(results) == 12
    for how, (logprobs, entropy, gradient, parameter) in results.items():
        value_tolerance, gradient_tolerance = TOLERANCES[how[0]]
        assert logprobs < value_tolerance, how
        assert entropy < value_tolerance, how
        assert gradient < gradient_tolerance, (how, parameter)


def test_a_window_or_a_missing_rope_layer_would_show(tmp_path):
    """The comparison above could not fail if the test sequences were shorter than the windows, or
    every layer alike."""
    assert max(len(t.tokens) for t in model_batch(True)) > 2 * tiny.OWN["mistral"]["sliding_window"]
    assert min(AutoConfig.from_pretrained(tiny.make(tmp_path / "m", "smollm3")).no_rope_layers) == 0


def dropout_of(mesh, folder):
    policy = Policy(PolicyConfig(model=str(folder), dtype="float32"), folder, mesh)
    in_modules = {
        m.attention_dropout for m in policy.model.modules() if hasattr(m, "attention_dropout")
    }
    return policy.model.training, policy.model.config.attention_dropout, in_modules


def test_dropout_of_the_config_is_zeroed(tmp_path):
    folder = tiny.make(tmp_path / "model", "qwen3", attention_dropout=0.3)
    assert json.loads((folder / "config.json").read_text())["attention_dropout"] == 0.3
    assert ranks(1, dropout_of, folder) == [(True, 0.0, {0.0})]


# --------------------------------------------------------------------------------------------------
# refusals


def test_a_family_off_the_allow_list_is_refused_by_name(tmp_path):
    GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=11)).save_pretrained(
        tmp_path
    )
    with pytest.raises(
        UserError,
        match=r"policy.model = x: family 'gpt2' is not supported; supported are llama, mistral",
    ):
        checks.check_supported(build.read_config(tmp_path), "policy.model = x")


def test_a_quantised_checkpoint_is_refused(tmp_path):
    folder = tiny.make(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {
        "quantization_config": {"quant_method": "gptq", "bits": 4}
    }
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="policy.model = x is quantised"):
        checks.check_supported(build.read_config(folder), "policy.model = x")


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tensor_parallel", "usable"),
    [
        (12, 4, 3, "1, 2, 4, 12"),
        (12, 4, 8, "1, 2, 4, 12"),
        (6, 2, 4, "1, 2, 6"),
        (8, 2, 4, None),
        (8, 8, 8, None),
        (9, 3, 9, None),
    ],
)
def test_tensor_parallel_sizes_that_split_a_head_are_refused_with_those_that_work(
    heads, kv_heads, tensor_parallel, usable
):
    """Key-value heads may be replicated (8 heads of 2 key-value heads on 4 ranks), never cut."""
    config = AutoConfig.for_model(
        "llama", num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=heads * 8
    )
    if usable is None:
        checks.check_supported(config, "policy.model = x", tensor_parallel)
        return
    with pytest.raises(UserError) as error:
        checks.check_supported(config, "policy.model = x", tensor_parallel)
    message = str(error.value)
    assert (
        f"engine.tensor_parallel_size = {tensor_parallel} does not divide "
        f"num_attention_heads = {heads} and num_key_value_heads = {kv_heads}"
    ) in message
    assert message.endswith(f"use one of {usable}")


@pytest.mark.parametrize(
    "content",
    ["{not json", "{}", '{"model_type": "nonsense"}'],
    ids=["not JSON", "no model type", "unknown type"],
)
def test_a_config_that_cannot_be_read_is_refused_by_file(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"config\.json"):
        build.read_config(tmp_path)


@pytest.mark.parametrize(
    ("missing", "named"),
    [("config.json", "config.json"), ("model.safetensors", "weights"), ("tokenizer*", "tokenizer")],
)
def test_an_incomplete_folder_is_refused_with_what_it_lacks(tmp_path, missing, named):
    folder = tiny.make(tmp_path / "model")
    assert build.find_folder(str(folder), "policy.model") == folder
    for path in folder.glob(missing):
        path.unlink()
    with pytest.raises(UserError, match=rf"policy.model = .*model has no {named}"):
        build.find_folder(str(folder), "policy.model")


def test_what_is_neither_a_folder_nor_a_hub_id_is_refused(tmp_path):
    with pytest.raises(
        UserError, match=r"policy.model = '.*nowhere' is neither a folder nor a hub id"
    ):
        build.find_folder(str(tmp_path / "nowhere"), "policy.model")


# --------------------------------------------------------------------------------------------------
# loading


def load_slices(mesh, folder):
    """(bytes that this rank read, every parameter gathered)"""
    model = meta_model(folder)
    sharding.shard(
        model,
        model.model.layers,
        mesh.fsdp,
        compute_dtype=torch.float32,
        reduce_dtype=torch.float32,
        reshard_after_forward=True,
    )
    num_bytes = tiny.load_counting_bytes(model, folder, mesh.device)
    return num_bytes, {n: p.full_tensor().detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize("files", ["one file", "several files"])
def test_two_ranks_read_half_of_the_file_each_and_together_have_all_of_it(tmp_path, files):
    folder = tiny.make(tmp_path / "model", "qwen2", tied=files == "one file", dtype=torch.bfloat16)
    if files == "several files":
        model = AutoModelForCausalLM.from_pretrained(folder)
        (folder / "model.safetensors").unlink()
        model.save_pretrained(folder, max_shard_size="60KB")
    on_disk = {n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}
    assert len(list(folder.glob("*.safetensors"))) > (files == "several files")
    total = sum(t.numel() * 2 for t in on_disk.values())
    results = ranks(2, load_slices, folder)
    assert sum(num_bytes for num_bytes, _ in results) == total
    for num_bytes, params in results:
        assert 0.45 * total < num_bytes < 0.55 * total
        assert params.keys() == on_disk.keys()
        for name, p in params.items():
            assert p.dtype == torch.float32
            assert torch.equal(p, on_disk[name].float()), name


def meta_model(folder):
    return build.make_meta_model(AutoConfig.from_pretrained(folder), torch.float32, score=False)


@pytest.mark.parametrize("change", ["missing", "other shape", "extra", "renamed"])
def test_weights_that_do_not_fit_the_config_are_refused_by_name(tmp_path, change):
    folder, name = tiny.make(tmp_path / "model", "llama"), "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    if change in ("missing", "renamed"):
        taken = tensors.pop(name)
    if change == "renamed":
        tensors[name.replace("up_proj", "upper")] = taken
    if change == "other shape":
        tensors[name] = tensors[name][:-1].contiguous()
    if change == "extra":
        name = "model.layers.2.mlp.up_proj.weight"
        tensors[name] = torch.zeros(2)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError) as error:
        loading.load_weights(meta_model(folder), folder, CPU)
    message = str(error.value)
    assert f"policy.model = {folder}: the weights do not fit its config.json" in message
    assert name in message
    assert ("upper" in message) == (change == "renamed")


def test_rotary_frequencies_in_an_old_file_are_passed_over(tmp_path):
    """Llama 2's files hold them; the model computes its own, as the library's and vLLM's loaders
    know."""
    folder = tiny.make(tmp_path / "model", "llama")
    tensors = load_file(folder / "model.safetensors")
    save_file(
        tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    assert tiny.load_counting_bytes(meta_model(folder), folder, CPU) == sum(
        t.numel() * 4 for t in tensors.values()
    )


def test_a_damaged_file_is_refused_by_name(tmp_path):
    folder = tiny.make(tmp_path / "model", "llama")
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(UserError, match=r"cannot read .*model\.safetensors"):
        loading.load_weights(meta_model(folder), folder, CPU)


# --------------------------------------------------------------------------------------------------
# the scratch model

PHRASE = "Spell this word backward (example: sun -> nus): "
SMALL = ScratchConfig(
    hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, phrases=[PHRASE]
)


def test_scratch_model_is_a_function_of_its_seed_and_loads_anywhere(tmp_path):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        scratch.make_model(SMALL, tmp_path / name, max_len=64, seed=seed)
    assert torch.equal(torch.get_rng_state(), before)
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not torch.equal(a["model.embed_tokens.weight"], c["model.embed_tokens.weight"])
    folder = build.find_folder(str(tmp_path / "a"), "policy.model")
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    checks.check_supported(model.config, "policy.model")
    assert model.config.vocab_size % 64 == 0
    assert model.config.vocab_size >= len(tokenizer)
    assert model.config.max_position_embeddings == 64
    assert (
        stop_token_ids(tokenizer, folder)
        == [tokenizer.eos_token_id]
        == [model.generation_config.eos_token_id]
    )


def unicode_texts():
    rng = np.random.default_rng(0)
    points = [int(p) for p in rng.integers(1, 0x110000, 3000) if not 0xD800 <= p < 0xE000]
    chosen = [
        "",
        " ",
        "  two  spaces  , . n't !",
        "naïve e\u0301 日本語 🙂👩\u200d👩 \r\n\t\x00\u2028",
        "<|nothing|> <b>",
    ]
    return chosen + ["".join(map(chr, points[i : i + 300])) for i in range(0, len(points), 300)]


def test_scratch_tokenizer_gives_any_text_back(tmp_path):
    tokenizer = scratch.make_tokenizer([PHRASE])
    tokenizer.save_pretrained(tmp_path)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    for text in unicode_texts():
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert len(ids) == len(text.encode())  # one token a byte
        assert saved(text)["input_ids"] == ids  # and none before or behind
        assert (
            tokenizer.decode(ids, skip_special_tokens=True)
            == saved.decode(ids, skip_special_tokens=True)
            == text
        )


def test_scratch_phrases_are_one_token_anywhere_in_a_text():
    tokenizer = scratch.make_tokenizer([PHRASE, "->"])
    assert len(tokenizer(PHRASE)["input_ids"]) == 1
    ids = tokenizer(f" x{PHRASE}y ->\n")["input_ids"]
    assert len(ids) == len(" x") + 1 + len("y ") + 1 + 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == f" x{PHRASE}y ->\n"


def test_scratch_template_ends_where_the_assistant_begins():
    tokenizer = scratch.make_tokenizer([])
    messages = to_messages("hi", "be brief")
    assert (
        tokenizer.decode(chat.encode(tokenizer, chat.render(tokenizer, messages)))
        == "<|system|>be brief<|end|><|user|>hi<|end|><|assistant|>"
    )
    assert (
        tokenizer.apply_chat_template(messages, tokenize=False)
        == "<|system|>be brief<|end|><|user|>hi<|end|>"
    )


# --------------------------------------------------------------------------------------------------
# chat

CHATML = (
    "{%- for m in messages -%}"
    "{{ '<|' + m.role + '|>' + '\n' + m.content + '<|end|>' + '\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' + '\n' }}{%- endif -%}"
)


@pytest.mark.parametrize(
    ("template", "behind"), [(scratch.TEMPLATE, ""), (CHATML, "\n")], ids=["scratch", "ChatML"]
)
@pytest.mark.parametrize("answer", ["42", "", "two\nlines \n", "日本"])
def test_an_answer_ends_with_the_stop_token_and_is_what_the_template_renders(
    template, behind, answer
):
    """The policy never samples what the template puts behind the token that stops it."""
    tokenizer = scratch.make_tokenizer([])
    tokenizer.chat_template = template
    messages = to_messages("6 * 7?", "")
    prompt = chat.encode(tokenizer, chat.render(tokenizer, messages))
    ((whole, mask, _),) = encode_chat(
        tokenizer,
        [*messages, {"role": "assistant", "content": answer}],
        [1],
        [tokenizer.eos_token_id],
    )
    assert whole[: len(prompt)] == prompt and mask == [i >= len(prompt) for i in range(len(whole))]
    ids = whole[len(prompt) :]
    assert ids[-1] == tokenizer.eos_token_id
    assert ids.count(tokenizer.eos_token_id) == 1
    rendered = tokenizer.apply_chat_template(
        [*messages, {"role": "assistant", "content": answer}], tokenize=False
    )
    assert tokenizer.decode(prompt + ids) + behind == rendered
    assert tokenizer.decode(ids, skip_special_tokens=True) == answer


def test_a_template_that_ends_no_answer_is_refused():
    tokenizer = scratch.make_tokenizer([])
    tokenizer.chat_template = "{%- for m in messages -%}{{ m.content + '\n' }}{%- endfor -%}"
    with pytest.raises(UserError, match="does not end an answer by one of the stop tokens"):
        encode_chat(
            tokenizer,
            [*to_messages("hi", ""), {"role": "assistant", "content": "yes"}],
            [1],
            [tokenizer.eos_token_id],
        )


def test_stop_tokens_are_the_tokenizer_s_and_the_generation_config_s(tmp_path):
    tokenizer = scratch.make_tokenizer([])
    assert stop_token_ids(tokenizer, tmp_path) == [1]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 1]}')
    assert stop_token_ids(tokenizer, tmp_path) == [1, 4]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 3}')
    assert stop_token_ids(tokenizer, tmp_path) == [1, 3]
    (tmp_path / "config.json").write_text('{"model_type": "llama", "eos_token_id": [4, 5]}')
    assert stop_token_ids(tokenizer, tmp_path) == [1, 3]
    (tmp_path / "generation_config.json").unlink()
    assert stop_token_ids(tokenizer, tmp_path) == [1, 4, 5]
    (tmp_path / "config.json").unlink()
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="names an eos token"):
        stop_token_ids(tokenizer, tmp_path)


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path):
    tokenizer = scratch.make_tokenizer([])
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="has no chat template; .* --data.no-apply-chat-template"):
        load_tokenizer(tmp_path)


def test_messages_keep_their_own_system_prompt():
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]
    assert to_messages(own, "other") == own
    assert to_messages(own[1:], "other") == [{"role": "system", "content": "other"}, own[1]]
    assert to_messages("hi", "") == own[1:]
