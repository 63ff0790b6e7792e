#include "store/device/nccl_link.h"

#include <atomic>
#include <cstring>
#include <deque>
#include <string>
#include <thread>
#include <utility>

#include "store/device/cuda_driver.h"
#include "store/device/nccl_library.h"

namespace ptc {
namespace {

constexpr int kRanks = 2;
// Of threads, each with some of a device's processors. What runs at the same time must have room on
// the device at the same time, or pairs that wait for each other wait for ever.
constexpr int kMostThreadGroups = 4;
constexpr auto kPause = std::chrono::microseconds(50);

/// NCCL's calls return at once, and the thread that waits asks how far it is. No other one ever
/// calls NCCL for this link: abort() only leaves word.
class NcclLink final : public DeviceLink {
 public:
  NcclLink(const CudaDriver& driver, const NcclLibrary& nccl, NodeMemory memory,
           const NcclLibrary::UniqueId& id, DeviceLinkMaker::End end)
      : driver_(driver),
        nccl_(nccl),
        memory_(memory),
        id_(id),
        rank_(end == DeviceLinkMaker::End::kAsks ? 0 : 1) {}

  /// As any end may be at work yet, and NCCL may wait for the other one: on a thread of its own.
  ~NcclLink() override {
    const auto end = [&driver = driver_, &nccl = nccl_, communicator = communicator_,
                      stream = stream_, device = device_, context = context_] {
      if (context == nullptr) return;
      (void)driver.cuCtxSetCurrent(context);
      if (communicator != nullptr) (void)nccl.ncclCommAbort(communicator);
      if (stream != nullptr) (void)driver.cuStreamDestroy(stream);
      (void)driver.cuDevicePrimaryCtxRelease(device);
    };
    try {
      std::thread(end).detach();
    } catch (const std::exception&) {  // no thread
      end();
    }
  }

  Result<> open() {
    PTC_TRY(driver_.check(driver_.cuDeviceGet(&device_, static_cast<int>(memory_.device())),
                          "cuDeviceGet"));
    CudaDriver::Context context = nullptr;
    PTC_TRY(driver_.check(driver_.cuDevicePrimaryCtxRetain(&context, device_),
                          "cuDevicePrimaryCtxRetain"));
    context_ = context;
    PTC_TRY(enter());
    return driver_.check(driver_.cuStreamCreate(&stream_, CudaDriver::kNonBlocking),
                         "cuStreamCreate");
  }

  Result<> connect(Deadline deadline) override {
    PTC_TRY(failure());
    PTC_TRY(sticky(enter()));
    NcclLibrary::Config config;
    config.blocking = 0;
    config.most_thread_groups = kMostThreadGroups;
    PTC_TRY(sticky(
        nccl_.check(nccl_.ncclCommInitRankConfig(&communicator_, kRanks, id_, rank_, &config),
                    "ncclCommInitRankConfig")));
    return poll(deadline, [this] { return settled(); });
  }

  Result<> send(ConstMemoryPointer bytes, uint64_t count) override {
    return begin(bytes.memory(), {true, bytes.address(), count});
  }
  Result<> receive(MemoryPointer to, uint64_t count) override {
    return begin(to.memory(), {false, to.address(), count});
  }

  Result<> wait(Deadline deadline) override {
    PTC_TRY(failure());
    PTC_TRY(sticky(enter()));
    return poll(deadline, [this]() -> Result<bool> {
      PTC_TRY(const bool has_begun, advance());
      if (!has_begun) return false;
      const CudaDriver::Result done = driver_.cuStreamQuery(stream_);
      if (done == CudaDriver::kNotReady) return false;
      PTC_TRY(driver_.check(done, "cuStreamQuery"));
      return true;
    });
  }

  void abort() override { aborted_ = true; }

 private:
  struct Work {
    bool sends;
    uintptr_t address;
    uint64_t count;
  };

  Result<> enter() const {
    return driver_.check(driver_.cuCtxSetCurrent(context_), "cuCtxSetCurrent");
  }
  Result<> failure() const {
    if (failed_.has_error()) return Error(failed_.error());
    return ok();
  }
  Result<> sticky(Result<> result) {
    if (!failed_.has_error()) failed_ = std::move(result);
    return failure();
  }

  Result<> begin(NodeMemory memory, const Work& work) {
    PTC_TRY(failure());
    if (memory != memory_)
      return invalid_argument("{} bytes in {} are not in the memory of {}", work.count,
                              memory.to_string(), memory_.to_string());
    if (work.count == 0) return ok();
    work_.push_back(work);
    PTC_TRY(sticky(enter()));
    auto advanced = advance();
    if (advanced.has_error()) return sticky(std::move(advanced).error());
    return ok();
  }

  /// Whether NCCL is done with what it was told last: the stream has it.
  Result<bool> settled() {
    NcclLibrary::Result state = NcclLibrary::kSuccess;
    PTC_TRY(nccl_.check(nccl_.ncclCommGetAsyncError(communicator_, &state), "ncclCommGetAsyncError",
                        communicator_));
    PTC_TRY(nccl_.check(state, "NCCL", communicator_));
    return state == NcclLibrary::kSuccess;
  }

  /// Tells NCCL what it can be told without waiting; whether that was all, and the stream has it.
  Result<bool> advance() {
    for (;;) {
      PTC_TRY(const bool is_settled, settled());
      if (!is_settled) return false;
      if (work_.empty()) return true;
      const Work work = work_.front();
      work_.pop_front();
      void* const bytes = reinterpret_cast<void*>(work.address);
      const int peer = 1 - rank_;
      const NcclLibrary::Result begun =
          work.sends
              ? nccl_.ncclSend(bytes, work.count, NcclLibrary::kInt8, peer, communicator_, stream_)
              : nccl_.ncclRecv(bytes, work.count, NcclLibrary::kInt8, peer, communicator_, stream_);
      PTC_TRY(nccl_.check(begun, work.sends ? "ncclSend" : "ncclRecv", communicator_));
    }
  }

  template <class Done>
  Result<> poll(Deadline deadline, Done done) {
    for (;;) {
      if (aborted_) return sticky(Error(Code::kCancelled, "the link was given up"));
      Result<bool> now = done();
      if (now.has_error()) return sticky(std::move(now).error());
      if (now.value()) return ok();
      if (std::chrono::steady_clock::now() >= deadline)
        return sticky(Error(Code::kUnavailable, "the other end of the link says nothing"));
      std::this_thread::sleep_for(kPause);
    }
  }

  const CudaDriver& driver_;
  const NcclLibrary& nccl_;
  const NodeMemory memory_;
  const NcclLibrary::UniqueId id_;
  const int rank_;
  CudaDriver::Device device_ = 0;
  CudaDriver::Context context_ = nullptr;
  CudaDriver::Stream stream_ = nullptr;
  NcclLibrary::Communicator communicator_ = nullptr;
  std::deque<Work> work_;  // that NCCL was not told of yet
  Result<> failed_ = ok();
  std::atomic<bool> aborted_ = false;
};

class NcclLinkMaker final : public DeviceLinkMaker {
 public:
  NcclLinkMaker(const CudaDriver& driver, const NcclLibrary& nccl) : driver_(driver), nccl_(nccl) {}

  const std::string& name() const override { return nccl_.name; }
  Result<std::string> make_id() override {
    NcclLibrary::UniqueId id;
    PTC_TRY(nccl_.check(nccl_.ncclGetUniqueId(&id), "ncclGetUniqueId"));
    return std::string(id.bytes, sizeof id.bytes);
  }
  Result<std::unique_ptr<DeviceLink>> make(Device& device, const std::string& id,
                                           End end) override {
    NcclLibrary::UniqueId unique;
    if (id.size() != sizeof unique.bytes)
      return invalid_argument("NCCL's ids have {} bytes, this one has {}", sizeof unique.bytes,
                              id.size());
    std::memcpy(unique.bytes, id.data(), id.size());
    auto link = std::make_unique<NcclLink>(driver_, nccl_, device.memory(), unique, end);
    PTC_TRY(link->open());
    return std::unique_ptr<DeviceLink>(std::move(link));
  }

 private:
  const CudaDriver& driver_;
  const NcclLibrary& nccl_;
};

}  // namespace

Result<std::unique_ptr<DeviceLinkMaker>> make_nccl_links() {
  PTC_TRY(const NcclLibrary* const nccl, NcclLibrary::load());
  PTC_TRY(const CudaDriver* const driver, CudaDriver::load());
  return std::make_unique<NcclLinkMaker>(*driver, *nccl);
}

}  // namespace ptc
