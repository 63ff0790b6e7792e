// The files of a checkpoint that is being committed: found_files.cc finds them here,
// commit_elsewhere.cc hears of them from other nodes, and found_tensors.cc reads what is in them.
#pragma once

#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "reshard/checkpoint/file_format.h"
#include "reshard/intake/commit.h"
#include "reshard/intake/file_hash.h"
#include "store/base/file.h"

namespace ptc {

inline constexpr size_t kMaxConfigBytes = 8 << 20;
inline constexpr size_t kMostConfigKept = 64 << 10;  // with the manifest

/// A file below rank/<r>/, or of what lies in the place of rank/. With tensors: what its format
/// says of it, too, without its literals.
struct Found : FileTensors {
  uint64_t rank = 0;
  std::string path;  // below the rank's directory
  FileVersion version;
  HashCache::Ticket ticket = 0;  // to put its checksums
  uint64_t links = 0;
  std::optional<ReadRights>
      rights;  // with what directories on the way to it allow; nullopt: a node did not say
  bool has_tensors = false;
  /// Where it is below the directory that is committed, if not at rank/<rank>/<path>: a framework
  /// put it there, for all ranks at once or in directories of its own.
  std::string at;
  /// Why it could not be read as torch.save's, if it may be; it may as well be something else.
  std::string problem;
  bool index = false;  // the index of a set; says nothing that the set does not
  /// Of an index: the shards that are not on its node, by path, and their tensors.
  std::map<std::string, std::vector<std::string>> asked;
  std::string set;
  std::string set_index;              // of a shard: the file that names it
  std::vector<std::string> promised;  // of a shard: the tensors that the index says it holds
  // With tensors:
  bool told = false;  // what lies where in it other files say: its own node has to be told
  uint64_t header_bytes = 0;
  std::string header;  // its outline (file_format.h)
  /// Its arrays are the parts of wholes that it says, whatever the layout is, and all ranks' files
  /// of this path together have the wholes.
  bool spread() const { return !boxes.empty() && !said.empty(); }
  // As its kind of tree says (tree_format.h):
  bool by_stage = false;                 // TensorInfo::by_stage, of all its tensors
  std::vector<TensorEntry> with_others;  // its rank's, too, in the file of another rank
  std::string config;  // facts of its model that are said beside it, as a config.json; empty: none
  std::vector<uint32_t> model_tensor;  // by position in tensors
  std::vector<SubTensor> parts;
  std::vector<std::vector<Checksum>> sums;         // by tensor, of each piece
  std::vector<std::vector<FoundPadding>> padding;  // by tensor; of a set: none
  Checksum whole;                                  // without tensors: of all its bytes
  const FilesElsewhere* node = nullptr;            // that has it; null: this one
  uint32_t number = 0;                             // in that node's list

  /// Below the directory that is committed.
  std::string source() const { return at.empty() ? fmt::format("rank/{}/{}", rank, path) : at; }
};

/// To be committed, as FileToHash.
inline FileToHashRef to_hash(int dir_fd, const Found& file) {
  return std::make_shared<const FileToHash>(dir_fd, file.source(), file.version, file.ticket);
}

/// Files below rank/<r>/, by rank and path; or, without rank/, what is in its place, of which only
/// the files of all nodes tell what it is (flat_files.h). `beside_others`: the rest may be on other
/// nodes, and this one need have none: who makes directories everywhere writes into some.
/// kInvalidArgument also: it is, or has in it, a copy of a checkpoint's own directory.
Result<std::vector<Found>> find_files(int dir_fd, bool beside_others = false);
/// kInvalidArgument: `spec` does not have the rank.
Result<> check_rank(uint64_t rank, const LayoutSpec& spec);
/// kBusy, naming the first on this node that is open for writing.
Result<> check_closed(int dir_fd, const std::vector<Found>& found);
/// The same, before they are hashed: gives them their tickets.
Result<> begin_hashing(int dir_fd, std::vector<Found>& found, HashCache& hashes);
/// Reads the file's outline and what tensors it has.
Result<> read_header(int dir_fd, Found& file);
/// The same of a file that may be torch.save's; what is wrong with it becomes its `problem`.
Result<> read_if_torch(int dir_fd, Found& file);
/// Of a file on another node, whose outline that has sent, what more this says.
Result<> read_outline_elsewhere(Found& file);
/// No tensors are read out of it, though its node may have looked what tensors are in it.
void keep_as_it_is(Found& file);
/// kInvalidArgument, naming the file that has most: the outlines of `files` have more than `limit`.
Result<> check_outlines(std::span<const Found* const> files, uint64_t limit);
/// Whether tensors are looked for in torch's files: where there are no others.
bool torch_files_count(const std::vector<Found>& found);
/// Reads what is in those that has_tensors says. `torch`: they are torch.save's, and those without
/// tensors in them are others.
Result<> read_files(int dir_fd, std::vector<Found>& found, bool torch, Executor& executor,
                    std::stop_token stop);
/// Which files have tensors, and what these are: as the first kind of tree says that reads them
/// (tree_format.h). All others are kept as they are.
class FileReader;
Result<> read_tensors(const FileReader& files, std::vector<Found>& found, Executor& executor,
                      std::stop_token stop);

/// How far the job's data set is: the count in a file of this name beside rank/, or in a rank's.
inline constexpr std::string_view kConsumedFile = "consumed";
struct FoundCount {
  uint64_t count;
  std::string file;  // that says so
};
/// kInvalidArgument: two of the files differ, or the one beside rank/ holds no count; a rank's that
/// holds none is the writer's own. `found`: what find_files() found here; dir_fd may be −1.
Result<std::optional<FoundCount>> find_consumed(int dir_fd, const std::vector<Found>& found,
                                                const std::vector<FilesElsewhere>& elsewhere);

/// What list_files() said on another node; a text of it ("config", "layout", "consumed"), if there
/// is one.
Result<std::vector<Found>> read_listing(const FilesElsewhere& node);
Result<std::optional<std::string>> text_in_listing(const std::string& listing,
                                                   std::string_view key);

}  // namespace ptc
