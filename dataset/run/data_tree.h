// The names below gen/<number>/, and what they stand for:
//
//   rank-002/ids.u64                           ids the rank reads, in order: u64, little-endian
//   rank-002/tar/e000/000000.tar …             one a local batch
//   rank-002/{jsonl,tfrecord}/e000/00000.jsonl …   some whole local batches each, about 64 MiB at
//     most;
//                                              at least 8 files if there are as many
//   rank-002/files/e000/000/00000123_<id>.<ext>    one a field of a sample; at most 1000 a
//     directory
//   global/mds/e000/{index.json,shard.00000.mds …}   global batches one behind the other
//   global/megatron/train.{bin,idx}            all epochs
//   README                                     in each tree: the call that reads it
//
// Numbers have more digits where their row is longer: names sort as numbers. Which trees there are,
// depends on the source. A listing makes names and sizes nothing; a file is made, and so sized,
// when it is asked for, and remembered for a while (FileLru).
#pragma once

#include <functional>
#include <list>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "dataset/run/data_set.h"
#include "dataset/tree/virtual_file.h"
#include "store/base/error.h"
#include "store/base/mutex.h"

namespace ptc {

/// Files made lately, by name, up to some number of samples in them. Threads: any.
class FileLru {
 public:
  explicit FileLru(uint64_t most_samples) : most_samples_(most_samples) {}
  using Make = std::function<Result<VirtualFileRef>()>;
  Result<VirtualFileRef> get(const std::string& name, uint64_t samples, const Make& make);

 private:
  struct Entry {
    std::string name;
    uint64_t samples;
    VirtualFileRef file;
  };
  const uint64_t most_samples_;
  Mutex mutex_;
  std::list<Entry> entries_ PTC_GUARDED_BY(mutex_);  // the last used first
  std::unordered_map<std::string, std::list<Entry>::iterator> by_name_ PTC_GUARDED_BY(mutex_);
  uint64_t samples_ PTC_GUARDED_BY(mutex_) = 0;
};

class DataDir;
/// One of the two is set.
struct DataNode {
  std::shared_ptr<const DataDir> directory;
  std::function<Result<VirtualFileRef>()> file;
};

/// Immutable. Threads: any.
class DataDir {
 public:
  struct Name {
    std::string name;
    bool directory;
  };
  virtual ~DataDir() = default;
  virtual Result<DataNode> find(std::string_view name) const = 0;  // kNotFound
  /// Always in the same order. Errors: only where names must be read from shards.
  virtual Result<std::vector<Name>> list() const = 0;
  /// The shard that readers want next when they have opened this one; empty: none.
  virtual std::string after(std::string_view) const { return ""; }
};
using DataDirRef = std::shared_ptr<const DataDir>;

/// What is under gen/<number>/.
DataDirRef make_generation_dir(const ShownGenerationRef& generation);

}  // namespace ptc
