// Checksums of tensors in files. While a file may still change it is read with pread; sealed by a
// commit, it is mapped: no byte is copied. One that is shorter than it was is an error in any case.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <stop_token>
#include <string>
#include <vector>

#include "reshard/exec/executor.h"
#include "reshard/intake/commit.h"
#include "store/base/error.h"
#include "store/base/file.h"
#include "store/codec/safetensors.h"
#include "store/tensor/box.h"
#include "store/tensor/checksum.h"

namespace ptc {

/// A file that is to be read more than once, and takes no descriptor meanwhile. Threads: any.
class FileToHash {
 public:
  /// `path` below a directory that stays open. Without a ticket what is hashed of it is not kept.
  FileToHash(int dir_fd, std::string path, const FileVersion& version, HashCache::Ticket ticket = 0)
      : dir_fd_(dir_fd), path_(std::move(path)), version_(version), ticket_(ticket) {}
  const FileVersion& version() const { return version_; }
  HashCache::Ticket ticket() const { return ticket_; }
  /// kBusy: it is not as it was in that version.
  Result<UniqueFd> open() const;

 private:
  int dir_fd_;
  std::string path_;
  FileVersion version_;
  HashCache::Ticket ticket_;
};
using FileToHashRef = std::shared_ptr<const FileToHash>;

/// A tensor array of a file, and which part of which global shape it is.
struct ArrayToHash {
  FileToHashRef file;
  uint32_t number = 0;  // in the file
  TensorEntry entry;
  SubTensor part;
  Shape global_shape;
};

enum class FileState { kOpen, kSealed };

/// One checksum per piece, for every array of sealed files, those of one file after each other;
/// what `hashes` knows is not read again. About as many files are open at once as the executor has
/// threads. `done`: the bytes are counted there.
Result<std::vector<std::vector<Checksum>>> hash_arrays(const std::vector<ArrayToHash>& arrays,
                                                       Executor& executor, HashCache& hashes,
                                                       std::stop_token stop,
                                                       std::atomic<uint64_t>* done = nullptr);

/// One array on the calling thread, into `hashes`; broken off, all that was hashed until then. `fd`
/// is its file.
Result<> hash_array(const ArrayToHash& array, int fd, HashCache& hashes, std::stop_token stop);

/// A whole file as a vector of bytes.
Result<Checksum> hash_file(const FileToHash& file, FileState state, HashCache& hashes,
                           std::stop_token stop);

/// The parts of a local array that no piece covers and that are not all zeros.
struct FoundPadding {
  Box local;
  Checksum checksum;  // of those bytes, in C order
};
Result<std::vector<FoundPadding>> find_padding(const FileToHash& file, const TensorEntry& entry,
                                               const SubTensor& part);

}  // namespace ptc
