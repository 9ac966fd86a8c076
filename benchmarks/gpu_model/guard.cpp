// A CUDA device guard that does nothing, so that fake tensors on "cuda" work in a CPU build of torch.
// There is one device, number 0, with one stream; every event has already happened.

#include <c10/core/impl/DeviceGuardImplInterface.h>

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::EventFlag;
using c10::Stream;

namespace {

Device only_device() {
  return Device(DeviceType::CUDA, 0);
}

Stream only_stream() {
  return Stream(Stream::DEFAULT, only_device());
}

struct FakeCudaGuard final : public c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }

  Device exchangeDevice(Device) const override { return only_device(); }
  Device getDevice() const override { return only_device(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void synchronizeDevice(const DeviceIndex) const override {}

  Stream getStream(Device) const noexcept override { return only_stream(); }
  Stream getDefaultStream(Device) const override { return only_stream(); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return only_stream(); }
  Stream getNewStream(Device, int) const override { return only_stream(); }
  Stream exchangeStream(Stream) const noexcept override { return only_stream(); }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}

  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};

FakeCudaGuard guard;

}  // namespace

// Put the guard where torch looks for that of CUDA; 1 if it stands there afterwards.
extern "C" int install() {
  auto& place = c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)];
  place.store(&guard);
  return place.load() == &guard ? 1 : 0;
}
