"""The CUDA paths, run without a GPU: every kind of training on pretended devices, in one process.

A wrong signature, tensors on two devices and a new wait of the host fail here."""

import json
import math
import re
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import tiny
from benchmarks.dryrun import pretend
from benchmarks.dryrun.engine import regions_of_all_ranks
from benchmarks.dryrun.jobs import Load, trajectories
from benchmarks.dryrun.meter import Meter
from harness import ranks
from minirl.algo import losses
from minirl.base.errors import UserError
from minirl.batch.packing import pack
from minirl.config.policy import LoraConfig, ParallelConfig, PolicyConfig
from minirl.config.rl import AlgoConfig
from minirl.parallel import fsdp
from minirl.parallel.regions import local_region
from minirl.plan.cards import CARDS
from minirl.train.policy import Policy
from programs import fork

NUM_LAYERS = 2
LOAD = {"tokens": 256, "sequence": 64, "prompt": 16, "num_micro": 1}
TWO_MICRO = LOAD | {"num_micro": 2}
PAIRS = LOAD | {"samples": 2, "whole_groups": True}
# A step of the optimizer: the denominators before it, metrics and the norm of the gradient behind.
WAITS = {
    ("a copy from the device", "train/policy.py _accumulate < train/policy.py update"): 1,
    ("a copy from the device", "train/policy.py _reduce_metrics < train/policy.py _step"): 1,
}
# The norm of gradients on the host joins the sums on the device.
NORM_WAITS = {("a copy to the device", "train/policy.py _step < train/policy.py update"): 1}
# The library's towers wait, in every forward pass: for grids, and in each layer for lengths.
TOWER = "model/images.py _look < model/images.py last_hidden"
DEEPSTACK = "model/images.py last_hidden < model/causal.py last_hidden"
QWEN2_VL_WAITS = {
    ("a copy to the device", TOWER): 2,
    ("a size that depends on values", TOWER): 2,
    ("numbers", TOWER): 2 * (2 + 3 * NUM_LAYERS),
}
# The load of experts is a metric of the step.
LOAD_WAITS = {("a copy from the device", "model/routing.py finish < train/policy.py _step"): 1}
OF_STEP = WAITS | LOAD_WAITS
# Expert parallelism waits in every forward of a layer, once: for the numbers of rows that travel.
EXPERT_WAITS = {
    ("numbers", "model/experts.py forward < model/causal.py last_hidden"): 2 * NUM_LAYERS
}
QWEN3_VL_WAITS = {
    ("a copy to the device", TOWER): 2,
    ("a size that depends on values", TOWER): 2 * 4,
    ("a size that depends on values", DEEPSTACK): 2 * 2,  # masks of rows
    ("a number", TOWER): 2,
    ("numbers", TOWER): 2 * (2 + 3 * NUM_LAYERS),
    ("a size that depends on values", "train/policy.py _accumulate < train/policy.py update"): 3,
}
# The padding among its tokens is left out.
GEMMA4_WAITS = {
    ("a size that depends on values", TOWER): 2,
    ("a size that depends on values", "train/policy.py _accumulate < train/policy.py update"): 1,
}


@dataclass
class Kind:
    """What is run, and what must come out."""

    family: str = "qwen3"
    tied: bool = False
    sizes: dict = field(default_factory=dict)  # Of the model, where they are not the usual ones.
    job: dict = field(default_factory=dict)
    waits: dict = field(default_factory=lambda: WAITS)
    attention_layers: int = NUM_LAYERS  # The others have gated delta nets.
    flash_calls: int = 1  # Calls of FlashAttention in a layer's forward.
    recomputed: int = 0  # Of these, calls in backward.
    optimizer_share: float | None = 2.0  # Bytes of its state for each byte of parameters.


def policy(**settings):
    return {"policy": settings}


def parallel(**axes):
    return {"parallel": axes}


KINDS = {
    "untied, whole accumulation": Kind(job=policy(accumulate="whole") | {"load": TWO_MICRO}),
    "sharded accumulation": Kind(job=policy(accumulate="sharded") | {"load": TWO_MICRO}),
    "tied, refit": Kind(tied=True, job={"refit": {}}),
    "torch kernels": Kind(job=policy(kernels="torch")),
    "liger kernels, no checkpointing": Kind(
        job=policy(kernels="liger", activation_checkpointing="off")
    ),
    "selective checkpointing": Kind(job=policy(activation_checkpointing="selective")),
    "full checkpointing": Kind(job=policy(activation_checkpointing="full"), recomputed=1),
    "muon": Kind(job=policy(optimizer="muon"), optimizer_share=None),
    "8bit": Kind(job=policy(optimizer_state="8bit"), optimizer_share=None),
    "muon in 8bit": Kind(
        job=policy(optimizer_state="8bit", optimizer="muon"), optimizer_share=None
    ),
    "offload": Kind(job=policy(optimizer_state="offload"), optimizer_share=0.0),
    "cpu_offload": Kind(job=policy(cpu_offload=True), waits=WAITS | NORM_WAITS),
    "ema": Kind(job=policy(ema_decay=0.9), optimizer_share=3.0),
    "tensor": Kind(job=parallel(tensor=2)),
    "sequence parallel": Kind(job=parallel(tensor=2, sequence=True)),
    "context, all_gather": Kind(job=parallel(context=2), flash_calls=2),
    "context, ring": Kind(job=parallel(context=2, context_engine="ring"), flash_calls=2),
    "hsdp": Kind(job=parallel(replicate=2) | {"load": TWO_MICRO}),
    "trainers and generators": Kind(job=parallel(generators=2) | {"refit": {}}),
    "mixture": Kind("qwen3_moe", job={"load": TWO_MICRO}, waits=OF_STEP),
    "mixture, tensor, refit": Kind(
        "qwen3_moe", job=parallel(tensor=2) | {"refit": {}}, waits=OF_STEP
    ),
    "mixture, expert parallel, refit": Kind(
        "qwen3_moe", job=parallel(experts=2) | {"refit": {}}, waits=OF_STEP | EXPERT_WAITS
    ),
    "mixture, experts of tensor ranks": Kind(
        "qwen3_moe", job=parallel(tensor=2, experts=4), waits=OF_STEP | EXPERT_WAITS
    ),
    "glm4_moe": Kind("glm4_moe", waits=OF_STEP),
    "softcap": Kind("gemma2", tied=True, flash_calls=0),
    "windows, refit": Kind("gemma3_text", tied=True, job={"refit": {}}),
    "hybrid": Kind("qwen3_5_text", attention_layers=1),
    "hybrid, full checkpointing": Kind(
        "qwen3_5_text",
        job=policy(activation_checkpointing="full"),
        attention_layers=1,
        recomputed=1,
    ),
    "hybrid mixture, tensor, refit": Kind(
        "qwen3_next", job=parallel(tensor=2) | {"refit": {}}, waits=OF_STEP, attention_layers=1
    ),
    "critic": Kind(job={"loss": "value"}),
    "reward": Kind(job={"loss": "reward", "load": PAIRS}),
    "dpo": Kind(job={"loss": "dpo", "load": PAIRS}),
    "kto": Kind(job={"loss": "kto"}),
    "sft": Kind(job={"loss": "sft"}),
    "frozen": Kind(job={"loss": "frozen"}, waits={}, optimizer_share=0.0),
    "images, qwen3_vl": Kind("qwen3_vl", waits=WAITS | QWEN3_VL_WAITS),
    "images, qwen2_vl": Kind("qwen2_vl", waits=WAITS | QWEN2_VL_WAITS),
    "images, gemma3": Kind("gemma3", tied=True, flash_calls=2),
    "images, gemma4": Kind(
        "gemma4",
        tied=True,
        # An image has 64 tokens there; and the tower for sound, which is not trained, is left out.
        job={"load": LOAD | {"sequence": 128, "prompt": 80}},
        sizes={"audio": False},
        flash_calls=3,  # in two layers: images see ahead in the one with a window
        waits=OF_STEP | GEMMA4_WAITS,
    ),
}
# Kinds of which little is trained.
LORA = {"rank": 4}
ADAPTED = {
    "adapters, full checkpointing": policy(lora=LORA, activation_checkpointing="full"),
    "adapters, tensor": policy(lora=LORA) | parallel(tensor=2),
    "adapters of experts": policy(lora=LORA) | {"load": TWO_MICRO},
    "four bits, refit": policy(lora=LORA | {"quantization": "nf4"}) | {"refit": {}},
    "critic on a shared base": policy(lora=LORA) | {"loss": "value", "share_base": True},
}
OF_MIXTURES = ("adapters of experts",)
# The same on CPU, where everything is really allocated.
REAL = {
    "dp": ({}, {}),
    "tp": ({"tensor": 2}, {}),
    "cp": ({"context": 2}, {}),
    "lora": ({}, {"rank": 4}),
    "nf4": ({}, {"rank": 4, "quantization": "nf4"}),
}
WRONG = {
    "an axis that does not divide": parallel(tensor=3),
    "a prompt without room for an image": {"load": LOAD | {"prompt": 2}},
    "no micro-batches": {"load": LOAD | {"num_micro": 0}},  # which no program asks for
}


# Of a model whose matrices can be cut into blocks of 64.
EVEN = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 16}


def model_folder(root, family, tied, **sizes):
    folder = root / f"{family}-{tied}-{len(sizes)}"
    return folder if folder.exists() else tiny.make(folder, family, tied=tied, **sizes)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def results(models):
    """Results by name, of one process."""
    if pretend.compiler() is None:
        pytest.skip("pretended devices need g++, which is not installed")
    jobs = {}
    for name, kind in KINDS.items():
        folder = model_folder(models, kind.family, kind.tied, **kind.sizes)
        jobs[name] = {"folder": str(folder), "load": LOAD, "sleep": True} | kind.job
    plain = str(model_folder(models, "qwen3", False))
    even = str(model_folder(models, "qwen3", False, **EVEN))
    for name, job in ADAPTED.items():
        folder = even
        if "experts" in name:
            folder = str(model_folder(models, "qwen3_moe", False))
        jobs[name] = {"folder": folder, "load": LOAD, "sleep": True} | job
    for name, (axes, lora) in REAL.items():
        settings = policy(accumulate="sharded", dtype="float32", lora=lora) | parallel(**axes)
        folder = even if lora else plain
        jobs[name] = {"folder": folder, "load": TWO_MICRO, "world_size": 2} | settings
    for name, settings in WRONG.items():
        family = "qwen2_vl" if "image" in name else "qwen3"
        folder = model_folder(models, family, False)
        jobs[name] = {"folder": str(folder), "load": LOAD} | settings
    # In a fork, where torch has been imported.
    text = json.dumps(list(jobs.values()))
    done = fork("benchmarks.dryrun.jobs", [], models / "log", 500, text=text)
    assert done.code == 0, done.err
    return dict(zip(jobs, json.loads(done.out), strict=True))


def shapes_of(folder, kind):
    """Shapes of the model's parameters, by transformers alone."""
    config = AutoConfig.from_pretrained(folder)
    reads_images = kind.family in tiny.READ_IMAGES
    auto_class = AutoModelForImageTextToText if reads_images else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto_class.from_config(config)
        if kind.job.get("loss") in ("value", "reward"):
            model.lm_head = torch.nn.Linear(config.hidden_size, 1, bias=False)
    return [p.shape for p in model.parameters()]


def first_shard(shape, num_shards):
    """Elements of rank 0's shard: rows are dealt out evenly, rounded up."""
    if len(shape) == 3 and shape[0] < num_shards:  # few experts, whose rows are sharded
        return math.prod(shape) // num_shards
    return math.ceil(shape[0] / num_shards) * math.prod(shape[1:])


def work(result, phase, kind):
    return result["phases"][phase]["work"].get(kind, {"kernels": 0, "flops": 0.0, "bytes": 0.0})


def num_kernels(result, phase):
    return sum(work["kernels"] for work in result["phases"][phase]["work"].values())


def check_kernels(kind, result):
    num_micro = kind.job.get("load", LOAD)["num_micro"]
    num_calls = kind.attention_layers * num_micro * kind.flash_calls
    if kind.job.get("loss") in ("policy", "value", "frozen", None):
        assert num_kernels(result, "annotate") > 0
        assert work(result, "annotate", "attention forward")["kernels"] == num_calls
    if kind.job.get("loss") == "frozen":
        return
    assert num_kernels(result, "forward") > 0
    assert num_kernels(result, "backward") > 0
    assert num_kernels(result, "optimizer") > 0
    assert work(result, "forward", "attention forward")["kernels"] == num_calls
    assert work(result, "backward", "attention backward")["kernels"] == num_calls
    again = work(result, "backward", "attention forward")["kernels"]
    assert again == num_calls * kind.recomputed
    # Two products in backward for each in forward, and those that are recomputed.
    flops = [work(result, phase, "matmul")["flops"] for phase in ("forward", "backward")]
    assert flops[1] > 1.5 * flops[0] > 0


def check_memory(kind, result, folder):
    on_host = kind.job.get("policy", {}).get("cpu_offload", False)
    parameters = result["parameter_bytes"]
    if on_host:
        assert parameters == result["optimizer_bytes"] == result["gradient_bytes"] == 0
        assert result["between_steps"]["cpu"] >= 3 * 4 * result["parameters"] / 8
    else:
        assert parameters > 0
        trained = kind.job.get("loss") != "frozen"
        assert result["gradient_bytes"] == (parameters if trained else 0)
        if kind.optimizer_share is not None:
            assert result["optimizer_bytes"] == kind.optimizer_share * parameters
    axes = kind.job.get("parallel", {})
    shapes = shapes_of(folder, kind)
    assert result["parameters"] == sum(map(math.prod, shapes))
    if axes.get("tensor", 1) == 1 and not on_host:
        num_shards = (8 - axes.get("generators", 0)) // axes.get("replicate", 1)
        itemsize = 2 if kind.job.get("loss") == "frozen" else 4
        expected = sum(first_shard(shape, num_shards) for shape in shapes) * itemsize
        assert parameters == expected

    assert result["between_steps"] == result["after_first_step"], "a step leaves memory behind"
    state = parameters + result["optimizer_bytes"]
    assert result["asleep"]["cuda"] <= result["between_steps"]["cuda"] - state
    assert result["asleep"]["cpu"] >= result["between_steps"]["cpu"]
    for name, phase in result["phases"].items():
        assert sum(phase["kinds"].values()) == phase["peak"], name


def without_lines(waits):
    """How often the host waits, by the reason and the functions."""
    total = Counter()
    for why, where, num in waits:
        total[why, re.sub(r":\d+", "", where)] += num
    return total


@pytest.mark.parametrize("name", KINDS)
def test_kind(name, results, models):
    """Each kind of training: kernels, memory by the shapes, and every wait of the host."""
    kind, result = KINDS[name], results[name]
    assert "error" not in result, f"{result['error']}\n{result['traceback']}"
    check_kernels(kind, result)
    check_memory(kind, result, model_folder(models, kind.family, kind.tied, **kind.sizes))
    num_micro = kind.job.get("load", LOAD)["num_micro"]
    expected = {key: num if key in OF_STEP else num * num_micro for key, num in kind.waits.items()}
    assert without_lines(result["waits"]) == expected


@pytest.mark.parametrize("name", ADAPTED)
def test_kind_with_adapters(name, results):
    """State and gradients are those of what is trained, and the host waits for nothing more."""
    result = results[name]
    assert "error" not in result, f"{result['error']}\n{result['traceback']}"
    expected = OF_STEP if name in OF_MIXTURES else WAITS
    assert without_lines(result["waits"]) == expected
    assert 0 < result["gradient_bytes"] < 0.5 * 4 * result["parameters"] / 8
    assert result["optimizer_bytes"] == 2 * result["gradient_bytes"]
    assert result["between_steps"] == result["after_first_step"], "a step leaves memory behind"
    alone = result["parameter_bytes"] == result["gradient_bytes"]
    assert alone == (name == "critic on a shared base")
    for phase in result["phases"].values():
        assert sum(phase["kinds"].values()) == phase["peak"]


def test_a_refit_reads_copies_of_a_base_that_sleeps(results):
    """Then nothing is left on the device but the adapters, which are in float32."""
    result = results["four bits, refit"]
    assert "error" not in result, result["error"]
    kinds_of_refit = result["phases"]["refit"]["kinds"]
    assert kinds_of_refit["parameters"] == result["gradient_bytes"]


def test_a_shared_base_is_the_policy_s(results):
    result = results["critic on a shared base"]
    alone = results["adapters, full checkpointing"]["parameter_bytes"]
    for phase in ("annotate", "forward", "backward", "optimizer"):
        kinds_of_phase = result["phases"][phase]["kinds"]
        assert kinds_of_phase["policy's parameters"] == alone


def test_attention_is_counted_pair_by_pair(results):
    """Answers see themselves, causally, and the prompt before them once."""
    load = TWO_MICRO
    answers = results["untied, whole accumulation"]["loss_rows"] // (
        load["sequence"] - load["prompt"]
    )
    shared, own = load["prompt"] - 1, load["sequence"] - load["prompt"]
    pairs = shared * (shared + 1) // 2 + answers * (own * (own + 1) // 2 + own * shared)
    heads_times_dim = 4 * 32
    flops = 4 * pairs * heads_times_dim * NUM_LAYERS * load["num_micro"]
    assert (
        work(results["untied, whole accumulation"], "forward", "attention forward")["flops"]
        == flops
    )
    assert (
        work(results["untied, whole accumulation"], "backward", "attention backward")["flops"]
        == 2.5 * flops
    )


def test_gated_delta_nets_are_counted_row_by_row(results):
    """By hand, of one layer: 8 heads with states of 16 x 8, in chunks of 64 rows."""
    in_chunk = 64 * (3 * 16 + 2 * 8)
    flops = 2 * 8 * (in_chunk + 3 * 16 * 8) * results["hybrid"]["rows"]
    assert work(results["hybrid"], "forward", "gated delta net")["flops"] == flops
    again = work(results["hybrid, full checkpointing"], "backward", "gated delta net")["flops"]
    backward = work(results["hybrid"], "backward", "gated delta net")["flops"]
    assert again == backward + flops


def test_liger_launches_fewer_kernels(results):
    plain, fused = results["torch kernels"], results["liger kernels, no checkpointing"]
    for phase in ("annotate", "forward", "backward"):
        assert num_kernels(fused, phase) < 0.8 * num_kernels(plain, phase)
    # Four norms, the gated activation and the positions of a layer, and the last norm.
    assert work(fused, "forward", "liger_kernel")["kernels"] == 6 * NUM_LAYERS + 1
    # The positions of models of a family are computed alike in a process (`fused.install`).
    assert work(plain, "forward", "liger_kernel")["kernels"] <= NUM_LAYERS


def test_the_heads_kernels_read_logits_once_each_way(results):
    """4 bytes of each, and 2 are written of its gradient."""
    result = results["selective checkpointing"]
    forward = work(result, "forward", "head_kernel")
    backward = work(result, "backward", "head_kernel")
    assert forward["kernels"] == backward["kernels"] == 1
    assert backward["bytes"] == pytest.approx(6 / 4 * forward["bytes"], rel=0.05)
    largest = result["phases"]["forward"]["kinds"]["logits"]
    assert forward["bytes"] == pytest.approx(largest, rel=0.1)


def test_checkpointing_keeps_less(results):
    held = [
        results[f"{which} checkpointing"]["phases"]["forward"]["kinds"]["activations"]
        for which in ("liger kernels, no", "selective", "full")
    ]
    assert held[0] > held[1] > held[2]
    backward = results["full checkpointing"]["phases"]["backward"]["kinds"]
    assert backward["recomputed activations"] > 0


def test_sharded_accumulation_keeps_no_whole_gradient(results):
    """Before the second micro-batch a rank has its shards, or the whole float32 gradient."""
    sharded, whole = (
        results[f"{how} accumulation"]["phases"]["forward"]["kinds"]["gradients"]
        for how in ("sharded", "untied, whole")
    )
    assert whole == 4 * results["untied, whole accumulation"]["parameters"]
    assert sharded == results["sharded accumulation"]["parameter_bytes"]


def test_optimizers_keep_what_they_say(results):
    parameters = results["untied, whole accumulation"]["parameter_bytes"]
    assert parameters < results["muon"]["optimizer_bytes"] < 2 * parameters
    assert results["8bit"]["optimizer_bytes"] < 0.6 * parameters
    assert results["muon in 8bit"]["optimizer_bytes"] < results["8bit"]["optimizer_bytes"]
    assert results["offload"]["between_steps"]["cpu"] >= 2 * parameters


def test_who_talks_to_whom(results):
    """Collectives beyond those of plain data parallelism."""

    def num(name, phase="forward"):
        result = results[name]
        num_micro = KINDS[name].job.get("load", LOAD)["num_micro"]
        return work(result, phase, "NCCL")["kernels"] / num_micro

    plain = num("selective checkpointing")
    for name in ("tensor", "sequence parallel", "context, all_gather", "context, ring"):
        assert num(name) > plain
    twice = "untied, whole accumulation"  # of two micro-batches, as HSDP
    assert num("hsdp") == num(twice)
    assert num("hsdp", "backward") > num(twice, "backward")  # over replicas, too


def test_a_mixture_multiplies_its_experts_at_once(results):
    """Two products a layer for all experts together, beside those of attention and head."""
    dense, mixture = (
        work(results[name], "forward", "matmul")
        for name in ("untied, whole accumulation", "mixture")
    )
    # gate, up and down become the router and two grouped products.
    assert mixture["kernels"] == dense["kernels"]


@pytest.mark.parametrize("name", [name for name in KINDS if "refit" in name])
def test_refit(name, results):
    """The engine gets every element once in bfloat16, all but rank 0's own over the wire."""
    result = results[name]
    refit = result["refit"]
    assert refit["engine_bytes"] == 2 * result["parameters"]
    missing = refit["engine_bytes"] - result["parameter_bytes"] // 2
    assert refit["received_bytes"] == missing
    assert 1 <= work(result, "refit", "NCCL")["kernels"] <= 20  # one for each kind of weights
    assert result["phases"]["refit"]["kinds"]["engine and refit"] >= refit["engine_bytes"]


def test_trainers_send_what_generators_receive(results):
    """A trainer packs its share for each engine, beside all its state, as the planner has it."""
    result = results["trainers and generators"]
    refit = result["refit"]
    assert refit["received_bytes"] == refit["engine_bytes"] == 2 * result["parameters"]
    assert refit["sent_bytes"] == pytest.approx(2 / 6 * refit["engine_bytes"], rel=0.1)
    sending = result["phases"]["refit"]["kinds"]
    assert sending["engine and refit"] == pytest.approx(refit["sent_bytes"], rel=0.1)
    state = result["parameter_bytes"] + result["optimizer_bytes"]
    assert sending["parameters"] + sending["optimizer"] == pytest.approx(state, rel=0.01)
    assert work(result, "refit", "NCCL")["kernels"] == work(result, "receive", "NCCL")["kernels"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("an axis that does not divide", "tensor = 3: their product, 3, does not divide the 8"),
        ("a prompt without room for an image", "has no room for an image"),
    ],
)
def test_a_job_that_cannot_run_says_why(name, message, results):
    """And the other jobs of the process ran."""
    assert re.search(message, results[name]["error"]) and results[name]["traceback"] == ""


def test_a_job_that_crashes_is_a_result_of_its_own(results):
    found = results["no micro-batches"]
    assert "stack expects a non-empty TensorList" in found["error"]
    assert "in _accumulate" in found["traceback"]


# What CUDA does with a scalar on the host beside tensors of the device.
WITH_A_SCALAR = {
    "cat": (lambda x, scalar: torch.cat([x, scalar[None]]), False),
    "stack": (lambda x, scalar: torch.stack([x[0], scalar]), False),
    "foreach": (lambda x, scalar: torch._foreach_mul([x, x[0]], [scalar, scalar]), False),
    "scatter": (lambda x, scalar: x.scatter(0, scalar.long(), x), False),
    "index_copy": (lambda x, scalar: x.index_copy(0, scalar.long(), x[:1]), False),
    "mul": (lambda x, scalar: x * scalar, True),
    "addcmul": (lambda x, scalar: x.addcmul(x, scalar), True),
    "where": (lambda x, scalar: x.where(x > 0, scalar), True),
    "copy_": (lambda x, scalar: x.copy_(scalar), True),
}


def mix_devices(mesh):
    """What the meter says to each of them, by name."""
    pretend.pretend_cuda()
    said = {}
    with FakeTensorMode(), Meter(CARDS["h100"], 8):
        x = torch.zeros(3, device="cuda")
        scalar = torch.zeros(())
        for name, (function, _) in WITH_A_SCALAR.items():
            try:
                function(x, scalar)
                said[name] = ""
            except RuntimeError as error:
                said[name] = str(error)
    return said


def test_a_scalar_on_the_host_joins_tensors_of_the_device_element_by_element_only():
    """FakeTensors alone let it pass in any operator."""
    if pretend.compiler() is None:
        pytest.skip("pretended devices need g++, which is not installed")
    (said,) = ranks(1, mix_devices)
    for name, (_, is_allowed) in WITH_A_SCALAR.items():
        refused = "expects all tensors to be on the same device" in said[name]
        assert refused != is_allowed, (name, said[name])
    assert said["stack"].startswith("aten.stack.default expects")
    assert "got cuda [], cpu []" in said["stack"]


def real_bytes(mesh, folder, parallel, lora):
    """What rank 0 really allocates, and whether the refit's plan knows the ranks' shards."""
    cfg = PolicyConfig(dtype="float32", accumulate="sharded", lora=LoraConfig(**lora))
    policy = Policy(cfg, folder, mesh)
    shards = policy.shards()
    regions = {name: local_region(p) for name, p in shards.items()}
    found = {"regions": mesh.gather(regions)}
    found["planned"] = regions_of_all_ranks(shards, mesh.world_size, parallel)
    found["parameter_bytes"] = sum(fsdp.local(p).nbytes for p in policy.model.parameters())
    step = policy.optimizer.step

    def count_and_step():
        trained = [p for p in policy.model.parameters() if p.requires_grad]
        gradients = [fsdp.local(p.grad) for p in trained]
        found["gradient_bytes"] = sum(t.nbytes for t in gradients)
        step()

    policy.optimizer.step = count_and_step
    minibatch = []
    for _ in range(2):
        batch = pack(trajectories(Load(**TWO_MICRO)), mesh.device, layout=policy.layout)
        batch.advantages = torch.zeros(len(batch.inputs))
        minibatch.append(batch)
    policy.annotate([minibatch], "old_logprobs")
    policy.update(minibatch, losses.policy(AlgoConfig(), LOAD["sequence"]), 1e-6)
    found["optimizer_bytes"] = sum(t.nbytes for t in policy.optimizer.tensors())
    return found


@pytest.mark.parametrize("name", REAL)
def test_bytes_are_those_of_a_real_run(name, results, models):
    """Two gloo ranks on CPU: parameters, optimizer and gradients within 1 %."""
    assert "error" not in results[name], results[name]
    axes_of_case, lora = REAL[name]
    axes = ParallelConfig(**axes_of_case)
    folder = model_folder(models, "qwen3", False, **(EVEN if lora else {}))
    real = ranks(2, real_bytes, folder, axes, lora, parallel=axes)[0]
    for what in ("parameter_bytes", "optimizer_bytes", "gradient_bytes"):
        assert results[name][what] == pytest.approx(real[what], rel=0.01), what
    assert real["planned"] == real["regions"]


def test_without_a_compiler_there_is_one_message(tmp_path):
    env = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = fork("benchmarks.dryrun.jobs", [], tmp_path / "log", text="[]", env=env)
    assert done.code == 2
    assert done.out == ""
    lines = [line for line in done.err.splitlines() if line]
    assert len(lines) == 1
    assert lines[0].startswith("minirl: error:") and "g++ is not installed" in lines[0]


def test_a_compiler_that_fails_is_quoted(tmp_path, monkeypatch):
    fake = tmp_path / "g++"
    fake.write_text("#!/bin/sh\necho 'no such header' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(UserError, match="cannot compile .*no such header"):
        pretend.library()
