#include "dataset/run/data_tree.h"

#include <algorithm>
#include <charconv>
#include <optional>

#include "dataset/run/plain_files.h"
#include "store/base/mutex.h"

namespace ptc {
namespace {

constexpr uint64_t kRememberedSamples = 4 << 20;  // 16 bytes each
constexpr uint64_t kMostFilesOfADirectory = 1000;
constexpr uint64_t kSamplesOfADirectory = 100;   // where it is not known how many files each has
constexpr uint64_t kMostSamplesOfAShard = 4096;  // a shard is whole when its first sample is there
constexpr uint64_t kLeastShards = 8;
constexpr uint64_t kMostBytesOfAShard = 64 << 20;  // of the source, about; or one local batch

Error no_such(std::string_view name) {
  return make_error(Code::kNotFound, "there is no {} here", name);
}

/// What all nodes of a generation need.
struct Shown {
  ShownGenerationRef generation;
  FileLru files{kRememberedSamples};
  const Generation& cuts() const { return generation->cuts; }
  const SampleSourceRef& source() const { return generation->source; }
};
using ShownRef = std::shared_ptr<Shown>;

int width_of(uint64_t number) { return static_cast<int>(fmt::formatted_size("{}", number)); }

uint64_t ceil_divide(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

/// Samples of a shard that is of a good size.
uint64_t most_samples_of_a_shard(const SampleSource& source) {
  const uint64_t mean =
      std::max<uint64_t>(1, source.bytes() / std::max<uint64_t>(1, source.samples()));
  return std::clamp<uint64_t>(kMostBytesOfAShard / mean, 1, kMostSamplesOfAShard);
}

/// The number in `name`, which is prefix, `width` digits or more, suffix: in no other way.
std::optional<uint64_t> number_in(std::string_view name, std::string_view prefix, size_t width,
                                  std::string_view suffix) {
  if (!name.starts_with(prefix) || !name.ends_with(suffix)) return std::nullopt;
  if (name.size() < prefix.size() + suffix.size() + width) return std::nullopt;
  const std::string_view digits =
      name.substr(prefix.size(), name.size() - prefix.size() - suffix.size());
  uint64_t number = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  if (error != std::errc() || end != digits.data() + digits.size()) return std::nullopt;
  if (digits.size() > width && digits[0] == '0') return std::nullopt;
  return number;
}

/// Some names, and a row of numbered ones: "rank-000" …
class RowDir : public DataDir {
 public:
  using Child = std::function<DataNode(uint64_t)>;
  struct Row {
    std::string prefix;
    int width;
    std::string suffix;
    uint64_t begin, end;
    bool directories;
    Child child;
  };

  void add(std::string name, DataNode node) {
    named_.emplace_back(std::move(name), std::move(node));
  }
  /// All names of the row are as wide as the last one, so that they sort as numbers.
  void set_row(Row row) {
    row_ = std::move(row);
    if (row_->end > 0) row_->width = std::max(row_->width, width_of(row_->end - 1));
  }

  Result<DataNode> find(std::string_view name) const override {
    for (const auto& [known, node] : named_) {
      if (known == name) return node;
    }
    if (const auto number = number_of(name)) return row_->child(*number);
    return no_such(name);
  }

  Result<std::vector<Name>> list() const override {
    std::vector<Name> names;
    for (const auto& [name, node] : named_) names.push_back({name, node.directory != nullptr});
    if (!row_) return names;
    names.reserve(names.size() + row_->end - row_->begin);
    for (uint64_t i = row_->begin; i < row_->end; ++i)
      names.push_back({name_of(i), row_->directories});
    return names;
  }

  std::string after(std::string_view name) const override {
    const auto number = number_of(name);
    return number && !row_->directories && *number + 1 < row_->end ? name_of(*number + 1) : "";
  }

 private:
  std::optional<uint64_t> number_of(std::string_view name) const {
    if (!row_) return std::nullopt;
    const auto number =
        number_in(name, row_->prefix, static_cast<size_t>(row_->width), row_->suffix);
    return number && *number >= row_->begin && *number < row_->end ? number : std::nullopt;
  }
  std::string name_of(uint64_t number) const {
    return fmt::format("{}{:0{}}{}", row_->prefix, number, row_->width, row_->suffix);
  }

  std::vector<std::pair<std::string, DataNode>> named_;
  std::optional<Row> row_;
};

DataNode directory(DataDirRef dir) { return {.directory = std::move(dir), .file = {}}; }
DataNode text(std::string content) {
  return {.directory = nullptr, .file = [file = make_text_file(std::move(content))] {
            return Result<VirtualFileRef>(file);
          }};
}

/// A shard made of `ids()`, about `samples` of them, remembered by `name`.
DataNode shard(const ShownRef& shown, TreeKind kind, std::string name, uint64_t samples,
               std::function<std::vector<uint64_t>()> ids) {
  auto make = [shown, kind, ids = std::move(ids)] {
    return make_shard(kind, shown->source(), ids());
  };
  return {.directory = nullptr,
          .file = [shown, name = std::move(name), samples, make = std::move(make)] {
            return shown->files.get(name, samples, make);
          }};
}

/// One directory an epoch.
DataDirRef epochs_dir(const ShownRef& shown, std::string readme,
                      const std::function<DataDirRef(uint64_t)>& epoch) {
  auto dir = std::make_shared<RowDir>();
  dir->add("README", text(std::move(readme)));
  dir->set_row({"e", 3, "", shown->cuts().first_epoch(), shown->cuts().end_epoch(), true,
                [epoch](uint64_t number) { return directory(epoch(number)); }});
  return dir;
}

/// Whole local batches to a file: one where `kind` is tar.
DataDirRef batches_dir(const ShownRef& shown, TreeKind kind, uint64_t rank, uint64_t epoch) {
  const Generation& cuts = shown->cuts();
  const uint64_t steps = cuts.steps(epoch);
  const uint64_t batch = ceil_divide(cuts.segment().batch, cuts.segment().dp);
  const uint64_t most = std::max<uint64_t>(1, most_samples_of_a_shard(*shown->source()) / batch);
  const uint64_t each =
      kind == TreeKind::kTar ? 1 : std::clamp<uint64_t>(ceil_divide(steps, kLeastShards), 1, most);
  auto dir = std::make_shared<RowDir>();
  auto child = [=](uint64_t number) {
    auto ids = [=] {
      std::vector<uint64_t> all;
      const Generation& of = shown->cuts();
      for (uint64_t i = number * each; i < std::min(steps, (number + 1) * each); ++i) {
        const std::vector<uint64_t> some = of.local_ids(of.step(epoch, i), rank);
        all.insert(all.end(), some.begin(), some.end());
      }
      return all;
    };
    return shard(shown, kind, fmt::format("{} {} {} {}", rank, tree_name(kind), epoch, number),
                 each * batch, ids);
  };
  dir->set_row({"", kind == TreeKind::kTar ? 6 : 5, fmt::format(".{}", tree_name(kind)), 0,
                ceil_divide(steps, each), false, child});
  return dir;
}

/// files/e000/000/: samples [first, first + count) of a rank's epoch, a file a field.
class FilesDir : public DataDir {
 public:
  FilesDir(ShownRef shown, uint64_t rank, uint64_t epoch, uint64_t first, uint64_t count, int width)
      : shown_(std::move(shown)),
        rank_(rank),
        epoch_(epoch),
        first_(first),
        count_(count),
        width_(width) {}

  Result<DataNode> find(std::string_view name) const override {
    const size_t line = name.find('_'), dot = std::min(name.find('.'), name.size());
    if (line == name.npos || line > dot) return no_such(name);
    const auto number = number_in(name.substr(0, line), "", static_cast<size_t>(width_), "");
    if (!number || *number < first_ || *number >= first_ + count_) return no_such(name);
    const uint64_t id = ids(*number, 1).at(0);
    if (name.substr(line + 1, dot - line - 1) != std::to_string(id)) return no_such(name);
    const std::string extension(dot < name.size() ? name.substr(dot + 1) : "");
    PTC_TRY(const auto names, member_extensions(*shown_->source(), id));
    const auto found = std::find(names.begin(), names.end(), extension);
    if (found == names.end() || (dot < name.size() && extension.empty())) return no_such(name);
    auto make = [source = shown_->source(), id, extension]() -> Result<VirtualFileRef> {
      PTC_TRY(auto members, members_of(source, id));
      for (Member& member : members) {
        if (member.extension == extension) return std::move(member.file);
      }
      return no_such(extension);
    };
    return DataNode{.directory = nullptr, .file = make};
  }

  Result<std::vector<Name>> list() const override {
    std::vector<Name> all;
    uint64_t number = first_;
    for (const uint64_t id : ids(first_, count_)) {
      PTC_TRY(const auto names, member_extensions(*shown_->source(), id));
      for (const std::string& extension : names) {
        all.push_back({fmt::format("{:0{}}_{}{}{}", number, width_, id,
                                   extension.empty() ? "" : ".", extension),
                       false});
      }
      ++number;
    }
    return all;
  }

 private:
  std::vector<uint64_t> ids(uint64_t number, uint64_t count) const {
    return shown_->cuts().rank_ids(
        rank_, shown_->cuts().local_samples_before(epoch_, rank_) + number, count);
  }

  const ShownRef shown_;
  const uint64_t rank_, epoch_, first_, count_;
  const int width_;  // of numbers
};

DataDirRef files_dir(const ShownRef& shown, uint64_t rank, uint64_t epoch) {
  const uint64_t fields = shown->source()->field_names().size();
  const uint64_t each =
      fields == 0 ? kSamplesOfADirectory : std::max<uint64_t>(1, kMostFilesOfADirectory / fields);
  const Generation& cuts = shown->cuts();
  const uint64_t count =
      cuts.local_samples_before(epoch + 1, rank) - cuts.local_samples_before(epoch, rank);
  const int width = std::max(8, width_of(count));
  auto dir = std::make_shared<RowDir>();
  dir->set_row({"", 3, "", 0, ceil_divide(count, each), true, [=](uint64_t number) {
                  const uint64_t first = number * each;
                  return directory(std::make_shared<FilesDir>(
                      shown, rank, epoch, first, std::min(each, count - first), width));
                }});
  return dir;
}

DataDirRef mds_dir(const ShownRef& shown, uint64_t epoch) {
  const uint64_t count = shown->cuts().global_samples(epoch);
  const uint64_t each = most_samples_of_a_shard(*shown->source());
  auto ids = [=](uint64_t number) { return shown->cuts().global_ids(epoch, number * each, each); };
  auto child = [=](uint64_t number) {
    return shard(shown, TreeKind::kMds, fmt::format("mds {} {}", epoch, number), each,
                 [=] { return ids(number); });
  };
  const uint64_t shards = ceil_divide(count, each);
  auto index = [=]() -> Result<VirtualFileRef> {
    // Not `shown`, which remembers the file.
    auto ids_of = [generation = shown->generation, epoch, each](uint64_t number) {
      return generation->cuts.global_ids(epoch, number * each, each);
    };
    return make_mds_index(shown->source(), {count, each, ids_of});
  };
  auto dir = std::make_shared<RowDir>();
  dir->add("index.json", {.directory = nullptr, .file = [=] {
                            return shown->files.get(fmt::format("index {}", epoch),
                                                    ceil_divide(shards, 4), index);
                          }});
  dir->set_row({"shard.", 5, ".mds", 0, shards, false, child});
  return dir;
}

/// The orders of the last epochs asked for.
class Orders {
 public:
  explicit Orders(Run run) : run_(std::move(run)) {}
  uint64_t id_at(uint64_t position) {
    const uint64_t epoch = position / run_.samples;
    std::shared_ptr<const SampleOrder> order;
    {
      MutexLock lock(mutex_);
      if (order_ == nullptr || epoch != epoch_) {
        order_ = std::make_shared<const SampleOrder>(run_.samples, run_.shuffle, run_.seed, epoch);
        epoch_ = epoch;
      }
      order = order_;
    }
    return order->at(position - epoch * run_.samples);
  }

 private:
  const Run run_;
  Mutex mutex_;
  uint64_t epoch_ PTC_GUARDED_BY(mutex_) = 0;
  std::shared_ptr<const SampleOrder> order_ PTC_GUARDED_BY(mutex_);
};

DataDirRef megatron_dir(const ShownRef& shown) {
  auto dir = std::make_shared<RowDir>();
  dir->add("README",
           text("Samples of all epochs in their order; Megatron must not shuffle them again:\n"
                "megatron.core.datasets.indexed_dataset.IndexedDataset('<this directory>/train', "
                "mmap=True)\n"));
  dir->add("train.bin", {.directory = nullptr, .file = [shown] {
                           return shown->files.get(
                               "bin", 1, [shown] { return make_megatron_bin(shown->source()); });
                         }});
  auto index = [shown] {
    auto orders = std::make_shared<Orders>(shown->cuts().run());
    // Not `shown`, which remembers the file.
    auto id_at = [generation = shown->generation, orders](uint64_t i) {
      return orders->id_at(generation->cuts.global_position(i));
    };
    return make_megatron_idx(shown->source(), shown->cuts().global_samples(), id_at);
  };
  dir->add("train.idx", {.directory = nullptr,
                         .file = [shown, index] { return shown->files.get("idx", 1, index); }});
  return dir;
}

std::string readme_of(TreeKind kind) {
  switch (kind) {
    case TreeKind::kTar:
      return "One tar a local batch, in order; with any number of workers batch_size is this "
             "rank's part of a batch:\n"
             "webdataset.WebDataset(sorted(glob.glob('<this directory>/e000/*.tar')), "
             "shardshuffle=False, "
             "nodesplitter=None)\n";
    case TreeKind::kJsonl:
      return "Some local batches a file, in order:\n"
             "datasets.load_dataset('json', data_files=sorted(glob.glob('<this "
             "directory>/e000/*.jsonl')), "
             "split='train', streaming=True)\n";
    case TreeKind::kTfrecord:
      return "Some local batches a file, in order:\n"
             "tf.data.TFRecordDataset(sorted(glob.glob('<this directory>/e000/*.tfrecord')))\n";
    case TreeKind::kMds:
      return "All ranks' samples in the order of the global batches; the reader splits them by "
             "rank itself:\n"
             "streaming.StreamingDataset(local='<this directory>/e000', remote=None, "
             "shuffle=False, "
             "num_canonical_nodes=1, batch_size=<local batch>)\n";
    case TreeKind::kFiles:
      return "One file a field of a sample, names in order: <number in the rank's "
             "epoch>_<id>.<field>:\n"
             "sorted(pathlib.Path('<this directory>/e000').glob('*/*'))\n";
    case TreeKind::kMegatron:
      break;
  }
  return "";
}

bool has(const ShownRef& shown, TreeKind kind) {
  const std::vector<TreeKind> kinds = trees_of(*shown->source());
  return std::find(kinds.begin(), kinds.end(), kind) != kinds.end();
}

DataDirRef rank_dir(const ShownRef& shown, uint64_t rank) {
  auto dir = std::make_shared<RowDir>();
  dir->add("ids.u64", {.directory = nullptr, .file = [shown, rank] {
                         return Result<VirtualFileRef>(make_ids_file(shown->generation, rank));
                       }});
  for (const TreeKind kind :
       {TreeKind::kTar, TreeKind::kJsonl, TreeKind::kTfrecord, TreeKind::kFiles}) {
    if (!has(shown, kind)) continue;
    dir->add(std::string(tree_name(kind)),
             directory(epochs_dir(shown, readme_of(kind), [=](uint64_t epoch) {
               return kind == TreeKind::kFiles ? files_dir(shown, rank, epoch)
                                               : batches_dir(shown, kind, rank, epoch);
             })));
  }
  return dir;
}

DataDirRef global_dir(const ShownRef& shown) {
  auto dir = std::make_shared<RowDir>();
  if (has(shown, TreeKind::kMds)) {
    dir->add("mds", directory(epochs_dir(shown, readme_of(TreeKind::kMds),
                                         [=](uint64_t epoch) { return mds_dir(shown, epoch); })));
  }
  if (has(shown, TreeKind::kMegatron)) dir->add("megatron", directory(megatron_dir(shown)));
  return dir;
}

}  // namespace

Result<VirtualFileRef> FileLru::get(const std::string& name, uint64_t samples, const Make& make) {
  {
    MutexLock lock(mutex_);
    if (const auto found = by_name_.find(name); found != by_name_.end()) {
      entries_.splice(entries_.begin(), entries_, found->second);
      return found->second->file;
    }
  }
  PTC_TRY(VirtualFileRef file, make());
  MutexLock lock(mutex_);
  if (by_name_.contains(name)) return file;  // another thread was quicker
  entries_.push_front({name, samples, file});
  by_name_[name] = entries_.begin();
  samples_ += samples;
  while (samples_ > most_samples_ && entries_.size() > 1) {
    samples_ -= entries_.back().samples;
    by_name_.erase(entries_.back().name);
    entries_.pop_back();
  }
  return file;
}

DataDirRef make_generation_dir(const ShownGenerationRef& generation) {
  auto shown = std::make_shared<Shown>();
  shown->generation = generation;
  auto dir = std::make_shared<RowDir>();
  dir->add("global", directory(global_dir(shown)));
  dir->set_row({"rank-", 3, "", 0, generation->cuts.segment().dp, true,
                [shown](uint64_t rank) { return directory(rank_dir(shown, rank)); }});
  return dir;
}

}  // namespace ptc
