#include "store/rpc/device_sender.h"

#include <algorithm>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <exception>
#include <utility>

#include "store/base/json.h"
#include "store/tensor/packed_copy.h"

namespace ptc {
namespace {

constexpr auto kPingWhileSending = std::chrono::seconds(1);

DeviceLink::Deadline link_deadline(std::chrono::milliseconds time) {
  return std::chrono::steady_clock::now() + time;
}

}  // namespace

DeviceSender::DeviceSender(Connection& connection, DeviceLinks* links, ImageStore& images,
                           SpareThreads& threads, std::string from_node)
    : connection_(connection),
      links_(links),
      images_(images),
      threads_(threads),
      from_node_(std::move(from_node)) {}

Result<> DeviceSender::check(const DeviceFetchRequest& fetch) {
  if (links_ == nullptr)
    return invalid_argument("no device of this node sends anything to another node");
  const auto maker = links_->maker();
  if (maker.has_error()) return Error(Code::kInvalidArgument, maker.error().message());
  if (const std::string& kind = maker.value()->name(); fetch.links != kind)
    return invalid_argument("this node has {}, and the other one {}: both must have the same", kind,
                            quoted(fetch.links));
  for (const FetchPart& part : fetch.fetch.parts)
    if (__builtin_add_overflow(bytes_, part.end - part.begin, &bytes_))
      return make_error(Code::kCorrupt, "more bytes are wanted than can be counted");
  chunk_bytes_ = std::min(fetch.chunk_bytes, links_->options().chunk_bytes);
  held_.resize(fetch.fetch.images.size());
  return ok();
}

Task<> DeviceSender::send(uint64_t request, const DeviceFetchRequest& fetch) {
  // Driver and NCCL may be loaded for it, which takes seconds.
  std::function<Result<>()> check = [&] { return this->check(fetch); };
  Result<> sent = co_await in_background(request, std::move(check));
  if (sent) sent = co_await send_chunks(request, fetch);
  if (gone_) co_return *gone_;
  if (sent) links_->keep(std::move(link_));
  link_.reset();
  if (sent && image_error_) sent = *std::move(image_error_);
  if (!sent) co_return co_await connection_.send(FrameType::kError, request, encode(sent.error()));
  const CallHeader end{"", 0};
  co_return co_await connection_.send(FrameType::kReply, request, encode(end));
}

Task<> DeviceSender::send_chunks(uint64_t request, const DeviceFetchRequest& fetch) {
  DeviceLinks::Held taken{nullptr, {nullptr}};  // link_ is this thread's
  std::function<Result<>()> take = [&]() -> Result<> {
    PTC_TRY(taken,
            links_->answer(from_node_, NodeMemory::cuda(fetch.device), fetch.link, fetch.id));
    return ok();
  };
  PTC_CO_TRY(co_await in_background(request, std::move(take)));
  link_ = std::move(taken);
  const CallHeader begin{"", bytes_};
  PTC_CO_TRY(hears(co_await connection_.send(FrameType::kReply, request, encode(begin))));
  if (!link_->id.empty()) {
    std::function<Result<>()> connect = [&]() -> Result<> {
      PTC_TRY(link_->link->connect(link_deadline(links_->options().connect)));
      link_->id.clear();
      return ok();
    };
    PTC_CO_TRY(co_await in_background(request, std::move(connect)));
  }
  for (size_t buffer = 0;; buffer = (buffer + 1) % StagedLink::kBuffers) {
    const MemoryPointer staging = link_->staging->at(buffer).begin();
    DeviceChunk chunk;
    std::function<Result<>()> next = [&]() -> Result<> {
      PTC_TRY(chunk, gather(fetch.fetch, staging));
      return link_->link->wait(link_deadline(links_->options().silence));  // of the one before
    };
    PTC_CO_TRY(co_await in_background(request, std::move(next)));
    if (chunk.bytes == 0) co_return ok();
    PTC_CO_TRY(hears(co_await connection_.send(FrameType::kDeviceChunk, request, encode(chunk))));
    PTC_CO_TRY(link_->link->send({staging.memory(), staging.address()}, chunk.bytes));
  }
}

Result<> DeviceSender::hears(Result<> sent) {
  if (sent.has_error()) gone_ = sent.error();
  return sent;
}

/// Work that waits for something else than the network; the peer hears meanwhile that this node
/// lives.
Task<> DeviceSender::in_background(uint64_t request, std::function<Result<>()> work) {
  std::optional<Result<>> done;  // written on this executor
  asio::steady_timer woken(co_await asio::this_coro::executor);
  std::function<void()> work_and_wake = [&] {
    auto result = std::make_shared<Result<>>(ok());
    try {
      *result = work();
    } catch (const std::exception& error) {  // no memory
      *result = Error(Code::kUnavailable, error.what());
    }
    asio::post(woken.get_executor(), [&done, &woken, result] {
      done.emplace(std::move(*result));
      woken.cancel();
    });
  };
  try {
    threads_.run(std::move(work_and_wake));
  } catch (const std::exception& error) {  // no thread, no memory
    co_return Error(Code::kUnavailable, error.what());
  }
  while (!done) {
    woken.expires_after(kPingWhileSending);
    co_await woken.async_wait(kTuple);
    if (done || gone_) continue;
    const auto sent = hears(co_await connection_.send(FrameType::kPing, request));
    if (!sent && link_) link_->link->abort();
  }
  if (gone_) co_return Error(*gone_);
  co_return *std::move(done);
}

/// The image of a part in the device's memory, held until all is sent.
Result<ConstMemoryPointer> DeviceSender::source_of(const FetchRequest& fetch,
                                                   const FetchPart& part) {
  ImageRef& image = held_[part.image];
  const std::string& id = fetch.images[part.image];
  if (image == nullptr) {
    PTC_TRY(ImageRef found, images_.open(ImageId{id}));
    if (const NodeMemory memory = found->place().memory; memory != link_->here)
      return make_error(Code::kNotFound, "image {} is in the memory of {}, not of {}", id,
                        memory.to_string(), link_->here.to_string());
    image = std::move(found);
  }
  if (part.runs.source_end() > image->bytes())
    return make_error(Code::kCorrupt, "image {} has {} bytes, {} are needed", id, image->bytes(),
                      part.runs.source_end());
  return image->map();
}

/// The next bytes, as many as a chunk has, in one launch. An error about an image ends what is
/// gathered.
Result<DeviceChunk> DeviceSender::gather(const FetchRequest& fetch, MemoryPointer buffer) {
  DeviceChunk chunk;
  std::vector<DeviceCopy> copies;
  bool fits = true;
  while (part_ < fetch.parts.size() && chunk.bytes < chunk_bytes_ && !image_error_) {
    const FetchPart& part = fetch.parts[part_];
    const uint64_t begin = part.begin + at_;
    const uint64_t bytes = std::min(part.end - begin, chunk_bytes_ - chunk.bytes);
    if (bytes > 0) {
      const auto source = source_of(fetch, part);
      if (source.has_error()) {
        image_error_ = source.error();
        break;
      }
      const MemoryPointer to = buffer + chunk.bytes;
      const uint64_t source_end = held_[part.image]->bytes();
      for_each_rectangle(part.runs, begin, begin + bytes, [&](const StridedCopy& rectangle) {
        fits = fits && lies_within(rectangle, source_end, begin, begin + bytes);
        copies.push_back({source.value(), {to.memory(), to.address() - begin}, rectangle});
      });
    }
    chunk.bytes += bytes;
    at_ += bytes;
    if (begin + bytes == part.end) {
      ++part_;
      at_ = 0;
    }
  }
  if (chunk.bytes == 0) return chunk;
  if (!fits) return make_error(Code::kInternal, "runs that leave their image or their chunk");
  const DeviceRun run{{buffer.memory(), buffer.address()}, chunk.bytes, 0, 0};
  PTC_TRY(link_->stream->copy_strided(copies));
  PTC_TRY(link_->stream->add_checksums({&run, 1}, {&chunk.sum, 1}));
  PTC_TRY(link_->stream->wait());
  return chunk;
}

}  // namespace ptc
