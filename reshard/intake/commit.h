// From what the ranks wrote to a checkpoint: finds the files, reads their headers, makes sense of
// them under the writer's layout, and hashes every tensor.
//
// The heavy part is hashing. A file that was hashed when it was closed (HashCache) is not read
// again: then a commit costs the headers only.
#pragma once

#include <sys/stat.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "reshard/checkpoint/manifest.h"
#include "reshard/exec/executor.h"
#include "reshard/ptc/layout.h"
#include "reshard/ptc/rule_set.h"
#include "store/base/error.h"
#include "store/base/mutex.h"
#include "store/codec/safetensors.h"

namespace ptc {

/// A file as it was at some moment. Changes when the file is written, but not with each store
/// through a mapping: on a tmpfs what is stored into a page that is mapped already moves no time.
struct FileVersion {
  uint64_t device = 0, inode = 0, bytes = 0;
  int64_t mtime_ns = 0;
  int64_t ctime_ns = 0;
  friend bool operator==(const FileVersion&, const FileVersion&) = default;
};
FileVersion version_of(const struct stat& st);

/// Checksums of files in incoming/, made before they are committed. Since times do not tell of all
/// that is written, what is known of a file rests on this: nobody had it open or mapped for writing
/// when it was hashed, and forget() was called whenever it was opened so. Threads: any.
class HashCache {
 public:
  /// The right to put sums of one file, until that is forgotten.
  using Ticket = uint64_t;
  /// Comes before the look whether anybody can write the file (open_for_writing), and that before
  /// its bytes are read: who opens it after the look makes the ticket worthless.
  Ticket begin(const FileVersion& file);
  /// `key` says of what in the file: which bytes of which array, and as what part of which tensor.
  std::optional<Checksum> find(const FileVersion& file, const std::string& key) const;
  /// Nothing, if the file was forgotten since the ticket was given, or became another version.
  void put(const FileVersion& file, Ticket ticket, const std::string& key, const Checksum& sum);
  void count(uint64_t bytes) { bytes_ += bytes; }
  uint64_t bytes() const { return bytes_; }  // hashed ever
  /// The file got another name or lost one, by us, and nobody has written it.
  void renew(const FileVersion& before, const FileVersion& now);
  /// Somebody may write the file, or it is a checkpoint's by now, or gone.
  void forget(uint64_t inode);
  size_t files() const;

  /// Of more the oldest go, which are hashed again at their commit: whoever may make files makes
  /// entries.
  static constexpr size_t kMostFiles = 1 << 16, kMostSums = 1 << 20;

 private:
  struct Entry {
    FileVersion version;
    Ticket ticket = 0;
    std::unordered_map<std::string, Checksum> sums;
  };
  using Files = std::unordered_map<uint64_t, Entry>;
  void drop(Files::iterator file) PTC_REQUIRES(mutex_);
  void make_room(Ticket beside) PTC_REQUIRES(mutex_);
  mutable Mutex mutex_;
  Files files_ PTC_GUARDED_BY(mutex_);                        // by inode
  std::map<Ticket, uint64_t> by_age_ PTC_GUARDED_BY(mutex_);  // inodes
  size_t sums_ PTC_GUARDED_BY(mutex_) = 0;
  Ticket last_ticket_ PTC_GUARDED_BY(mutex_) = 0;
  std::atomic<uint64_t> bytes_ = 0;
};

/// Asks nodes that have files elsewhere to read_parts(), each one question; waits for all answers.
using AskToRead = std::function<std::vector<Result<std::string>>(
    const std::vector<std::string>& nodes, const std::vector<std::string>& requests)>;

struct CommitRequest {
  int dir_fd = -1;                        // the directory with rank/ and layout.json in it
  std::string name;                       // for messages: "incoming/base"
  std::string node;                       // this one's name, for messages
  LayoutSpec in_force;                    // the writer's, unless the directory has a layout.json
  std::optional<std::string> rules_text;  // the job's rules.json
  /// Of the job's last checkpoint: its facts count where there is no config.json and the tensors
  /// that are in both are of the same shapes.
  std::shared_ptr<const Model> known_model;
  /// Tensors of the job's last checkpoint that FSDP leaves whole, by file and name.
  std::map<std::pair<std::string, std::string>, Shape> known_whole;
  /// Told how many bytes of tensors are to be hashed, on all nodes, before the first is. Then these
  /// are counted, on whatever thread; those of another node when it answers.
  std::function<void(uint64_t bytes_total)> hashing_begins = {};
  std::atomic<uint64_t>* bytes_hashed = nullptr;
  /// Asks all that have files elsewhere to hash_files(), in their order: `first`, and after each
  /// answer what `next` says, until it says nothing. Waits for all, and comes back with the last
  /// answer of each. Where there are such.
  using NextToHash =
      std::function<std::optional<std::string>(size_t i, const Result<std::string>& answer)>;
  std::function<std::vector<Result<std::string>>(const std::vector<std::string>& first,
                                                 const NextToHash& next)>
      hash_elsewhere = {};
  size_t hashed_at_once = 1 << 15;  // HashQuestions
  AskToRead read_elsewhere = {};    // where there are such
};

class ListedFiles;  // file_reads.h
class FilesToHash;  // hash_questions.h

/// The files of a checkpoint that another node has taken. `listing` is what its list_files() said.
struct FilesElsewhere {
  std::string node;
  std::string listing;
};

/// What another node must know of a directory's files to make sense of them: names, sizes, headers.
Result<std::string> list_files(int dir_fd);
/// What draft_commit asks a node that listed files, where others say what is in them: bytes of
/// them, and where in them the arrays of items lie (file_reads.h).
Result<std::string> read_parts(int dir_fd, ListedFiles& files, std::string_view request,
                               Executor& executor, std::stop_token stop);
/// And then: the checksums of their tensors' parts, of some at a time (HashQuestions).
Result<std::string> hash_files(int dir_fd, FilesToHash& files, std::string_view request,
                               Executor& executor, HashCache& hashes, std::stop_token stop);

/// A checkpoint that could be made of the directory. Nothing has been changed yet.
struct CommitDraft {
  Manifest manifest;  // without name, id, time and owner; files without image
  std::string headers;
  /// Paths under the directory, one for each of manifest.files: the file to take as its image.
  std::vector<std::string> sources;
  /// In the same order the node that has it; empty: this one.
  std::vector<std::string> nodes;
  /// What was looked at, in the same order; to see that it is still so after the files were taken.
  std::vector<FileVersion> versions;
  /// Every file that was looked at, also replicas that are not kept.
  std::vector<FileVersion> looked_at;
};

/// kInvalidArgument: what is wrong, in one paragraph. kBusy: a file is open for writing.
/// `elsewhere`: what ranks wrote on other nodes; then dir_fd may be −1, if there is nothing here.
Result<CommitDraft> draft_commit(const CommitRequest& request,
                                 const std::vector<FilesElsewhere>& elsewhere, Executor& executor,
                                 HashCache& hashes, std::stop_token stop);

/// Hashes one file that was just closed, as far as it is clear where its tensors belong without the
/// other ranks' files: under tp = ep = 1, or when `previous` has the same tensors. Errors do not
/// matter here; they are found again by draft_commit. false: nothing was hashed, as somebody has
/// the file open or mapped for writing.
bool hash_closed_file(int dir_fd, const std::string& path, uint64_t rank, const LayoutSpec& spec,
                      const Model* previous, HashCache& hashes, std::stop_token stop);

/// Whether anybody has the file open for writing (or mapped shared and writable). For a moment it
/// holds a lease: who opens the file for writing then waits that long, or gets EWOULDBLOCK.
Result<bool> open_for_writing(int dir_fd, const std::string& path);
bool open_for_writing(int fd);  // opened O_RDONLY

}  // namespace ptc
