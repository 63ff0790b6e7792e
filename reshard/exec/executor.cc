#include "reshard/exec/executor.h"

#include <boost/asio/post.hpp>
#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <optional>

namespace ptc {
namespace {

// Large enough that a chunk's set-up does not count, small enough that the pool stays busy to the
// end and a cancelled reshard stops at once.
constexpr uint64_t kChunkBytes = 16 << 20;

Result<uint64_t> local_array_bytes(const ArraySlot& slot, DType dtype) {
  PTC_TRY(auto elements, num_elements(slot.part.local_shape));
  return elements * dtype_bits(dtype) / 8;
}

}  // namespace

// Part of a piece: the logical bytes [begin, end) of the tensor, as far as the piece has them.
struct Executor::HashTask {
  uint32_t tensor;
  const Piece* piece;
  std::span<const std::byte> array;
  StridedCopy to_logical;  // from the local array to the whole tensor in C order
  uint64_t begin, end;
};

Result<> Executor::list_hash_tasks(const ImageLayout& layout, std::span<const std::byte> image,
                                   const std::vector<TensorFacts>& tensors,
                                   std::vector<HashTask>& tasks) {
  for (const ArraySlot& slot : layout.arrays) {
    PTC_TRY(auto bytes, local_array_bytes(slot, tensors[slot.tensor].dtype));
    if (slot.byte_offset > image.size() || bytes > image.size() - slot.byte_offset)
      return make_error(Code::kCorrupt, "an image has {} bytes, {} are needed", image.size(),
                        slot.byte_offset + bytes);
    for (const Piece& piece : slot.part.pieces) {
      if (piece.global.empty()) continue;
      PTC_TRY(auto copy, make_strided_copy({0, slot.part.local_shape}, piece.local_offset,
                                           {0, tensors[slot.tensor].shape}, piece.global.offset,
                                           piece.global.extent,
                                           dtype_bits(tensors[slot.tensor].dtype)));
      for (uint64_t begin = copy.target_offset; begin < copy.target_end(); begin += kChunkBytes)
        tasks.push_back({slot.tensor, &piece, image.subspan(slot.byte_offset, bytes), copy, begin,
                         std::min(begin + kChunkBytes, copy.target_end())});
    }
  }
  return ok();
}

Result<> Executor::hash(const std::vector<HashTask>& tasks, ChecksumLedger& ledger,
                        std::stop_token stop) {
  std::vector<Checksum> sums(tasks.size());
  PTC_TRY(parallel_for(
      tasks.size(),
      [&](size_t i) -> Result<> {
        const HashTask& task = tasks[i];
        for_each_run(task.to_logical, task.begin, task.end,
                     [&](uint64_t from, uint64_t logical_offset, uint64_t bytes) {
                       sums[i] += checksum_of_run(task.array.subspan(from, bytes), logical_offset);
                     });
        return ok();
      },
      std::move(stop)));
  for (size_t i = 0; i < tasks.size();) {
    const HashTask& task = tasks[i];
    Checksum sum;
    for (; i < tasks.size() && tasks[i].piece == task.piece; ++i) sum += sums[i];
    PTC_TRY(ledger.add(task.tensor, task.piece->global, sum));
  }
  return ok();
}

Result<> ChecksumLedger::add(uint32_t tensor, const Box& box, const Checksum& checksum) {
  if (parts_.size() <= tensor) parts_.resize(tensor + 1);
  for (const Part& part : parts_[tensor]) {
    if (part.box != box) continue;
    if (part.checksum == checksum) return ok();
    return make_error(Code::kCorrupt, "two copies of {} differ", box.to_string());
  }
  parts_[tensor].push_back({box, checksum});
  return ok();
}

Checksum ChecksumLedger::total(uint32_t tensor) const {
  Checksum sum;
  if (tensor < parts_.size())
    for (const Part& part : parts_[tensor]) sum += part.checksum;
  return sum;
}

uint64_t ChecksumLedger::elements(uint32_t tensor) const {
  uint64_t sum = 0;
  if (tensor < parts_.size())
    for (const Part& part : parts_[tensor]) sum += part.box.volume();
  return sum;
}

Executor::Executor(unsigned threads, std::unique_ptr<Transport> transport)
    : threads_(std::max(threads, 1u)), transport_(std::move(transport)), pool_(threads_) {}

Executor::~Executor() {
  pool_.stop();
  pool_.join();
}

Result<> Executor::parallel_for(size_t count, std::function<Result<>(size_t)> body,
                                std::stop_token stop) {
  struct Shared {
    std::atomic<size_t> next{0};
    std::mutex mutex;
    std::condition_variable done;
    unsigned running = 0;
    std::optional<Error> error;  // the first one
  } shared;
  auto work = [&] {
    for (;;) {
      size_t i = shared.next.fetch_add(1);
      if (i >= count) break;
      Result<> result = ok();
      try {
        result = stop.stop_requested() ? Result<>(Error(Code::kCancelled, "cancelled")) : body(i);
      } catch (const std::exception& error) {  // no memory: an error of this call, not of the daemon
        result = make_error(Code::kNoSpace, "{}", error.what());
      }
      if (result.has_error()) {
        shared.next = count;
        std::lock_guard lock(shared.mutex);
        if (!shared.error) shared.error = result.error();
      }
    }
    std::lock_guard lock(shared.mutex);
    if (--shared.running == 0) shared.done.notify_all();
  };
  shared.running = std::min<size_t>(threads_, count);
  for (unsigned i = 0, workers = shared.running; i < workers; ++i) boost::asio::post(pool_, work);
  std::unique_lock lock(shared.mutex);
  shared.done.wait(lock, [&] { return shared.running == 0; });
  if (shared.error) return *std::move(shared.error);
  return ok();
}

Result<std::vector<ImageRef>> Executor::materialise(ImageStore& images,
                                                    const std::vector<Target>& targets,
                                                    const std::vector<TensorFacts>& tensors,
                                                    ChecksumLedger& ledger,
                                                    std::atomic<uint64_t>& bytes_done,
                                                    std::stop_token stop) {
  std::vector<ImageWriter> writers;
  writers.reserve(targets.size());
  struct Chunk {
    size_t target;
    uint64_t begin, end;
  };
  std::vector<Chunk> chunks;
  for (size_t i = 0; i < targets.size(); ++i) {
    uint64_t bytes = targets[i].layout->bytes;
    PTC_TRY(auto writer, images.create(bytes));
    writers.push_back(std::move(writer));
    for (uint64_t begin = 0; begin < bytes; begin += kChunkBytes)
      chunks.push_back({i, begin, std::min(begin + kChunkBytes, bytes)});
  }
  PTC_TRY(parallel_for(
      chunks.size(),
      [&](size_t i) -> Result<> {
        const Chunk& chunk = chunks[i];
        auto window = writers[chunk.target].bytes().subspan(chunk.begin, chunk.end - chunk.begin);
        PTC_TRY(targets[chunk.target].program->read_onto_zeros(*transport_, chunk.begin, window,
                                                               stop));
        bytes_done += window.size();
        return ok();
      },
      stop));

  std::vector<HashTask> tasks;
  for (size_t i = 0; i < targets.size(); ++i) {
    PTC_TRY(list_hash_tasks(*targets[i].layout, writers[i].bytes(), tensors, tasks));
  }
  PTC_TRY(hash(tasks, ledger, stop));

  std::vector<ImageRef> published;
  for (ImageWriter& writer : writers) {
    ImageId id = writer.id();
    Result<ImageRef> image = images.publish(std::move(writer));
    if (image.has_error()) {
      (void)images.remove(id);
      for (const ImageRef& earlier : published) (void)images.remove(earlier->id());
      return std::move(image).error();
    }
    published.push_back(std::move(image).value());
  }
  return published;
}

Result<> Executor::hash_images(const std::vector<StoredArrays>& images,
                               const std::vector<TensorFacts>& tensors, ChecksumLedger& ledger,
                               std::stop_token stop) {
  std::vector<HashTask> tasks;
  for (const StoredArrays& stored : images) {
    PTC_TRY(auto bytes, stored.image->map());
    PTC_TRY(list_hash_tasks(*stored.layout, bytes, tensors, tasks));
  }
  return hash(tasks, ledger, std::move(stop));
}

Result<> compare_checksums(const ChecksumLedger& ledger, const std::vector<TensorFacts>& tensors,
                           const std::function<std::string(uint32_t)>& name) {
  std::string wrong;
  size_t count = 0;
  for (uint32_t tensor = 0; tensor < tensors.size(); ++tensor) {
    PTC_TRY(auto elements, num_elements(tensors[tensor].shape));
    if (ledger.elements(tensor) == elements &&
        ledger.total(tensor) == tensors[tensor].checksum)
      continue;
    if (++count <= 3) wrong += fmt::format("{}{}", wrong.empty() ? "" : ", ", name(tensor));
  }
  if (count == 0) return ok();
  return make_error(Code::kCorrupt, "the bytes of {} tensor{} do not have the checksum they had when "
                    "they were committed: {}{}", count, count == 1 ? "" : "s", wrong,
                    count > 3 ? ", …" : "");
}

}  // namespace ptc
