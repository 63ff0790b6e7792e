#include "reshard/exec/fetch_images.h"

#include <pthread.h>

#include <algorithm>
#include <thread>
#include <unordered_map>

#include "reshard/exec/incoming_sums.h"
#include "reshard/exec/remote_fetch.h"

namespace ptc {
namespace {

constexpr uint64_t kCopyBytes = 16 << 20;
// One launch within a device, which takes less time than that of the host's.
constexpr uint64_t kDeviceCopyBytes = 256 << 20;

using Range = std::pair<uint64_t, uint64_t>;  // of bytes: begin and end

/// Takes space for padding, which nobody writes. (Asking for the whole image again would look at
/// every page of it.)
Result<> take_rest(ImageWriter& writer, const ImageLayout& layout, std::vector<Range> taken) {
  for (const Literals::Piece& piece : layout.literals.pieces())
    taken.emplace_back(piece.offset, piece.end());
  std::sort(taken.begin(), taken.end());
  taken.emplace_back(layout.bytes, layout.bytes);
  uint64_t at = 0;
  for (const auto& [begin, end] : taken) {
    if (begin > at) {
      PTC_TRY(writer.take_space(at, begin));
    }
    at = std::max(at, end);
  }
  return ok();
}

/// Of what one transfer writes, the part that goes to target bytes [begin, end).
FetchItem item_of(const Transfer& transfer, const Image* source, uint64_t begin, uint64_t end,
                  MemoryPointer target, ImageWriter& writer) {
  return {source, transfer.copy, begin, end, target + begin, &writer};
}

}  // namespace

Result<std::vector<ImageRef>> fetch_images(ImageStore& images, Executor& executor,
                                           const std::vector<FetchTarget>& targets,
                                           const FetchSources& sources,
                                           const SummedTensors& tensors, ChecksumLedger& ledger,
                                           std::atomic<uint64_t>& bytes_done,
                                           std::stop_token stop) {
  std::vector<ImageWriter> writers;
  std::vector<MemoryPointer> memory;
  std::vector<ImageRef> shown;                    // of which other nodes may want what has come
  std::unordered_map<uint32_t, size_t> position;  // of a target's number
  for (const FetchTarget& target : targets) {
    PTC_TRY(auto writer, images.create(target.layout->bytes, ImageStore::TakeSpace::kLater,
                                       target.layout->memory));
    writers.push_back(std::move(writer));
    for (const Literals::Piece& piece : target.layout->literals.pieces()) {
      PTC_TRY(writers.back().write(piece.offset, std::as_bytes(std::span(piece.bytes))));
    }
    PTC_TRY(auto mapped, writers.back().map());
    if (std::any_of(target.transfers.begin(), target.transfers.end(), [](const Transfer& transfer) {
          return transfer.has_window() && !transfer.relay;
        })) {
      PTC_TRY(auto image, images.show(writers.back()));
      shown.push_back(std::move(image));
    }
    position.emplace(target.number, memory.size());
    memory.push_back(mapped);
  }

  Transport& transport = executor.transport();
  IncomingSums sums;
  RemoteFetch remote(transport, sources, bytes_done,
                     [&](std::span<const ImagePart> parts) { sums.came(parts); });
  struct Copies {  // of about as many bytes as are copied at once
    std::vector<FetchItem> items;
    std::vector<ImagePart> parts;  // by item
    uint64_t bytes = 0;
  };
  std::vector<Copies> local;
  struct Within {
    ImagePart part;
    FetchItem item;
    size_t source;  // number of another target
  };
  std::vector<Within> within;
  std::vector<std::vector<Range>> taken(targets.size());  // by transfers
  for (size_t t = 0; t < targets.size(); ++t) {
    const bool in_host = memory[t].memory().is_host();
    const uint64_t at_once = in_host ? kCopyBytes : kDeviceCopyBytes;
    if (in_host) {
      PTC_TRY(const auto host_bytes, writers[t].host_bytes());
      PTC_TRY(sums.add(*targets[t].layout, host_bytes, tensors));
    } else {
      PTC_TRY(auto image, images.show(writers[t]));
      PTC_TRY(sums.add_on_device(*targets[t].layout, std::move(image), tensors));
    }
    for (const Transfer& transfer : targets[t].transfers) {
      const uint64_t begin = std::max(transfer.begin, transfer.copy.target_offset);
      const uint64_t end = std::min(transfer.end, transfer.copy.target_end());
      taken[t].emplace_back(begin, end);
      if (transfer.source_image >= sources.images.size()) {
        const auto from = position.find(transfer.source_image - sources.images.size());
        // Of itself, too: a file may have a tensor twice. What it is made of never comes of
        // targets.
        if (from == position.end() || from->second > t)
          return make_error(Code::kInternal,
                            "target {} copies from target {}, which is not there yet",
                            targets[t].number, transfer.source_image - sources.images.size());
        within.push_back({{t, begin, end},
                          item_of(transfer, nullptr, begin, end, memory[t], writers[t]),
                          from->second});
        sums.expect({t, begin, end});
        continue;
      }
      const ImageRef& source = sources.images[transfer.source_image];
      if (source == nullptr)
        return make_error(Code::kInternal, "a source of the plan is not there");
      if (!source->is_here()) {
        remote.add(t, targets[t].number, transfer,
                   item_of(transfer, source.get(), begin, end, memory[t], writers[t]),
                   writers[t].id());
        sums.expect({t, begin, end});
        continue;
      }
      for (uint64_t at = begin; at < end; at += at_once) {
        const uint64_t to = std::min(at + at_once, end);
        if (local.empty() || local.back().bytes >= at_once) local.emplace_back();
        local.back().items.push_back(
            item_of(transfer, source.get(), at, to, memory[t], writers[t]));
        local.back().parts.push_back({t, at, to});
        local.back().bytes += to - at;
        sums.expect({t, at, to});
      }
    }
  }

  sums.start();
  Result<> fetched = ok(), copied = ok();
  {
    std::stop_source given_up;  // what the one cannot do, the other need not
    const std::stop_callback passes_on(stop, [&] { given_up.request_stop(); });
    std::jthread fetching([&] {
      ::pthread_setname_np(::pthread_self(), "ptcfs-fetch");
      fetched = remote.run(given_up.get_token());
    });
    // What comes over the links goes first, so that none stands still; this fills the gaps.
    ThreadTeam behind(executor.team().size());
    copied = behind.parallel_for(
        local.size(),
        [&](size_t i) -> Result<> {
          give_way();
          PTC_TRY(transport.fetch(local[i].items, stop));
          bytes_done += local[i].bytes;
          sums.came(local[i].parts);
          return ok();
        },
        stop);
    if (copied.has_error()) given_up.request_stop();
  }
  PTC_TRY(std::move(copied));
  if (fetched.has_error()) return std::move(fetched).error();
  for (Within& copy : within) {
    const MemoryPointer from = memory[copy.source];
    if (from.memory().is_host() && copy.item.target_at_begin.memory().is_host()) {
      PTC_TRY(copy.item.writer->take_space(copy.item.begin, copy.item.end));
      PTC_TRY(std::byte* const source, from.host());
      PTC_TRY(std::byte* const target, copy.item.target_at_begin.host());
      run_strided_copy(copy.item.copy, source, copy.item.begin, copy.item.end, target);
    } else {
      PTC_TRY(const ImageRef source, images.show(writers[copy.source]));
      copy.item.source = source.get();
      PTC_TRY(transport.fetch(std::span(&copy.item, 1), stop));
    }
    sums.came(std::span(&copy.part, 1));
  }
  for (size_t t = 0; t < targets.size(); ++t) {
    PTC_TRY(take_rest(writers[t], *targets[t].layout, std::move(taken[t])));
  }
  PTC_TRY(sums.finish(executor.team(), ledger, stop));

  std::vector<ImageRef> published;
  for (ImageWriter& writer : writers) {
    const ImageId id = writer.id();
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

}  // namespace ptc
