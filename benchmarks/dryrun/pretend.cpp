// What autograd's engine asks of a CUDA device, answered by one that does nothing. pretend.py
// compiles and loads it.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

const Device kPretended(c10::kCUDA, 0);
const long kCuDNN = 91000;  // 9.10

// One device with one stream, on which everything is finished.
struct PretendedGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  DeviceIndex deviceCount() const noexcept override { return 1; }

  Device getDevice() const override { return kPretended; }
  Device exchangeDevice(Device) const override { return kPretended; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}

  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, kPretended); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, kPretended); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::DEFAULT, kPretended); }
  Stream getStreamFromGlobalPool(Device, bool) const override {
    return Stream(Stream::DEFAULT, kPretended);
  }
  Stream exchangeStream(Stream) const override { return Stream(Stream::DEFAULT, kPretended); }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}

  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};

struct PretendedHooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  // Builds of torch for CUDA ask for them when they choose a kernel for attention.
  long versionCuDNN() const override { return kCuDNN; }
  long versionRuntimeCuDNN() const override { return kCuDNN; }
};

}  // namespace

extern "C" void pretend_cuda() {
  const auto cuda = static_cast<int>(c10::kCUDA);
  c10::impl::device_guard_impl_registry[cuda].store(new PretendedGuard());
  // libtorch has made its hooks already. They become ours by their table of virtual functions,
  // which is the first word of an object; neither class has members.
  void* made = const_cast<void*>(static_cast<const void*>(&at::detail::getCUDAHooks()));
  std::memcpy(made, static_cast<const void*>(new PretendedHooks()), sizeof(void*));
}
