// Checksums of tensors in files. While a file may still change it is read with pread, so that one that
// shrinks meanwhile is an error and no SIGBUS; sealed by a commit, it is mapped: no byte is copied.
#pragma once

#include <cstdint>
#include <stop_token>
#include <string>
#include <vector>

#include "reshard/exec/executor.h"
#include "reshard/job/commit.h"
#include "store/base/error.h"
#include "store/codec/safetensors.h"
#include "store/tensor/box.h"
#include "store/tensor/checksum.h"

namespace ptc {

/// A tensor array of a file, and which part of which global shape it is.
struct ArrayToHash {
  int fd = -1;
  FileVersion version;
  uint32_t number = 0;  // in the file
  TensorEntry entry;
  SubTensor part;
  Shape global_shape;
};

enum class FileState { kOpen, kSealed };

/// One checksum per piece, for every array of sealed files; what `hashes` knows is not read again.
Result<std::vector<std::vector<Checksum>>> hash_arrays(const std::vector<ArrayToHash>& arrays,
                                                       Executor& executor, HashCache& hashes,
                                                       std::stop_token stop);

/// One array of an open file on the calling thread, into `hashes`; broken off, all that was hashed until then.
Result<> hash_array(const ArrayToHash& array, HashCache& hashes, std::stop_token stop);

/// A whole file as a vector of bytes.
Result<Checksum> hash_file(int dir_fd, const std::string& path, const FileVersion& version,
                           FileState state, HashCache& hashes, std::stop_token stop);

/// The parts of a local array that no piece covers and that are not all zeros.
struct FoundPadding {
  Box local;
  Checksum checksum;  // of those bytes, in C order
};
Result<std::vector<FoundPadding>> find_padding(int fd, const TensorEntry& entry,
                                               const SubTensor& part);

}  // namespace ptc
