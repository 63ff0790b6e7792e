#include "store/device/nccl_link.h"

#include <atomic>
#include <cstring>
#include <deque>
#include <string>
#include <thread>
#include <utility>

#include "store/base/mutex.h"

namespace ptc {
namespace {

constexpr int kRanks = 2;
// Of threads, each with some of a device's processors. What runs at the same time must have room on
// the device at the same time, or pairs that wait for each other wait for ever.
constexpr int kMostThreadGroups = 4;
constexpr auto kPause = std::chrono::microseconds(50);

using Kept = std::vector<std::shared_ptr<const void>>;

/// Memory of a device that may be gone: nobody gives it back, not at the end of the process either.
struct LostMemory {
  static void add(Kept kept) {
    static LostMemory* const all = new LostMemory;
    MutexLock lock(all->mutex);
    all->kept.push_back(std::move(kept));
  }

  Mutex mutex;
  std::vector<Kept> kept PTC_GUARDED_BY(mutex);
};

/// How many links are not at their end yet, those among them that nobody has any more. Threads:
/// any.
class EndingLinks {
 public:
  void begin() {
    MutexLock lock(mutex_);
    ++count_;
  }
  void end(Kept kept) {
    MutexLock lock(mutex_);
    if (was_left_) LostMemory::add(std::move(kept));
    else kept.clear();
    --count_;
    changed_.notify_all();
  }
  void wait(std::chrono::milliseconds longest) {
    MutexLock lock(mutex_);
    changed_.wait_until(mutex_, std::chrono::steady_clock::now() + longest,
                        [this]() PTC_REQUIRES(mutex_) { return count_ == 0; });
    was_left_ = count_ > 0;
  }

 private:
  Mutex mutex_;
  ConditionVariable changed_;
  size_t count_ PTC_GUARDED_BY(mutex_) = 0;
  bool was_left_ PTC_GUARDED_BY(mutex_) = false;
};

/// What NCCL and the driver have of a link.
struct LinkHandles {
  const CudaDriver& driver;
  const NcclLibrary& nccl;
  const std::shared_ptr<EndingLinks> ends;
  CudaDriver::Device device = 0;
  CudaDriver::Context context = nullptr;
  CudaDriver::Stream stream = nullptr;
  NcclLibrary::Communicator communicator = nullptr;
  Kept kept;

  /// May wait for the other end. Not before NCCL's kernels are gone is their memory let go of: one
  /// that runs into memory that is there no more takes the device's context with it, and all that
  /// lies in it.
  void end() {
    if (context != nullptr) {
      (void)driver.cuCtxSetCurrent(context);
      if (communicator != nullptr) (void)nccl.ncclCommAbort(communicator);
      if (stream != nullptr) (void)driver.cuStreamDestroy(stream);
      (void)driver.cuDevicePrimaryCtxRelease(device);
    }
    ends->end(std::move(kept));
  }
};

/// NCCL's calls return at once, and the thread that waits asks how far it is. No other one ever
/// calls NCCL for this link: abort() only leaves word.
class NcclLink final : public DeviceLink {
 public:
  NcclLink(const CudaDriver& driver, const NcclLibrary& nccl, std::shared_ptr<EndingLinks> ends,
           NodeMemory memory, const NcclLibrary::UniqueId& id, DeviceLinkMaker::End end)
      : driver_(driver),
        nccl_(nccl),
        memory_(memory),
        id_(id),
        rank_(end == DeviceLinkMaker::End::kAsks ? 0 : 1),
        handles_(new LinkHandles{driver, nccl, std::move(ends)}) {
    handles_->ends->begin();
  }

  /// On a thread of its own, where NCCL has anything of it.
  ~NcclLink() override {
    handles_->kept = std::move(kept_);
    if (handles_->communicator == nullptr) {
      handles_->end();
      return;
    }
    try {
      std::thread([handles = handles_] { handles->end(); }).detach();
    } catch (const std::exception&) {  // no thread
      handles_->end();
    }
  }

  Result<> open() {
    PTC_TRY(driver_.check(
        driver_.cuDeviceGet(&handles_->device, static_cast<int>(memory_.device())), "cuDeviceGet"));
    CudaDriver::Context context = nullptr;
    PTC_TRY(driver_.check(driver_.cuDevicePrimaryCtxRetain(&context, handles_->device),
                          "cuDevicePrimaryCtxRetain"));
    handles_->context = context;
    PTC_TRY(enter());
    return driver_.check(driver_.cuStreamCreate(&handles_->stream, CudaDriver::kNonBlocking),
                         "cuStreamCreate");
  }

  Result<> connect(Deadline deadline) override {
    PTC_TRY(failure());
    PTC_TRY(sticky(enter()));
    NcclLibrary::Config config;
    config.blocking = 0;
    config.most_thread_groups = kMostThreadGroups;
    PTC_TRY(sticky(nccl_.check(
        nccl_.ncclCommInitRankConfig(&handles_->communicator, kRanks, id_, rank_, &config),
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
      const CudaDriver::Result done = driver_.cuStreamQuery(handles_->stream);
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
    return driver_.check(driver_.cuCtxSetCurrent(handles_->context), "cuCtxSetCurrent");
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
    PTC_TRY(nccl_.check(nccl_.ncclCommGetAsyncError(handles_->communicator, &state),
                        "ncclCommGetAsyncError", handles_->communicator));
    PTC_TRY(nccl_.check(state, "NCCL", handles_->communicator));
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
          work.sends ? nccl_.ncclSend(bytes, work.count, NcclLibrary::kInt8, peer,
                                      handles_->communicator, handles_->stream)
                     : nccl_.ncclRecv(bytes, work.count, NcclLibrary::kInt8, peer,
                                      handles_->communicator, handles_->stream);
      PTC_TRY(nccl_.check(begun, work.sends ? "ncclSend" : "ncclRecv", handles_->communicator));
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
  const std::shared_ptr<LinkHandles> handles_;
  std::deque<Work> work_;  // that NCCL was not told of yet
  Result<> failed_ = ok();
  std::atomic<bool> aborted_ = false;
};

class NcclLinkMaker final : public DeviceLinkMaker {
 public:
  NcclLinkMaker(const CudaDriver& driver, const NcclLibrary& nccl,
                std::chrono::milliseconds longest_end)
      : driver_(driver), nccl_(nccl), longest_end_(longest_end) {}
  ~NcclLinkMaker() override { ends_->wait(longest_end_); }

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
    auto link = std::make_unique<NcclLink>(driver_, nccl_, ends_, device.memory(), unique, end);
    PTC_TRY(link->open());
    return std::unique_ptr<DeviceLink>(std::move(link));
  }

 private:
  const CudaDriver& driver_;
  const NcclLibrary& nccl_;
  const std::chrono::milliseconds longest_end_;
  const std::shared_ptr<EndingLinks> ends_ = std::make_shared<EndingLinks>();
};

}  // namespace

std::unique_ptr<DeviceLinkMaker> make_nccl_links(const CudaDriver& driver, const NcclLibrary& nccl,
                                                 std::chrono::milliseconds longest_end) {
  return std::make_unique<NcclLinkMaker>(driver, nccl, longest_end);
}

Result<std::unique_ptr<DeviceLinkMaker>> make_nccl_links() {
  PTC_TRY(const NcclLibrary* const nccl, NcclLibrary::load());
  PTC_TRY(const CudaDriver* const driver, CudaDriver::load());
  return make_nccl_links(*driver, *nccl);
}

}  // namespace ptc
