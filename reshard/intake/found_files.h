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

/// A file below rank/<r>/.
struct Found {
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
  uint64_t header_bytes = 0;
  std::string header;  // its outline (file_format.h)
  std::vector<TensorEntry> tensors;
  std::vector<Box>
      boxes;  // of the whole tensors, by position in tensors (shard_boxes.h); else empty
  std::vector<std::optional<SaidPart>> said;  // as FileTensors has them, and the next
  /// Its arrays are the parts of wholes that it says, whatever the layout is, and all ranks' files
  /// of this path together have the wholes.
  bool spread() const { return !boxes.empty() && !said.empty(); }
  std::vector<uint32_t> same_as;
  TorchNaming naming;
  std::optional<MegatronFile> megatron;
  bool of_megatron_stage = false;  // as FileTensors has it
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
  bool is_other_name(size_t tensor) const { return !same_as.empty() && same_as[tensor] != tensor; }
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
/// Marks the shards of sets with an index on this node. Those that an index names and are not among
/// `found` become what it asks of other nodes.
Result<> find_sets(int dir_fd, std::vector<Found>& found);
/// With the files of all nodes: marks what the indexes on any ask of others. kInvalidArgument: a
/// shard is nowhere, or of two sets.
Result<> join_sets(std::vector<Found>& found);
/// Compares each index with its shards. A tensor that the index lacks is welcome: who loads a set
/// loads all that its shards hold.
Result<> check_sets(const std::vector<Found>& found);
/// Shards without an index say by their names how many there are ("model-00002-of-00007"). Each
/// rank may have written one. Those of PyTorch's HuggingFaceStorageWriter ("shard-…") have parts of
/// tensors, and say so inside.
Result<> check_numbered_shards(const std::vector<Found>& found);
/// Reads the file's outline and what tensors it has.
Result<> read_header(int dir_fd, Found& file);
/// The same of a file that may be torch.save's; what is wrong with it becomes its `problem`.
Result<> read_if_torch(int dir_fd, Found& file);
/// kInvalidArgument, naming the file that has most: the outlines of `files` have more than `limit`.
Result<> check_outlines(std::span<const Found* const> files, uint64_t limit);
/// Whether tensors are looked for in torch's files: where there are no others.
bool torch_files_count(const std::vector<Found>& found);
/// Which files have tensors, and what these are: of the first of these kinds that there is,
/// safetensors, distributed checkpointing, .npy, torch.save's. All others are kept as they are.
Result<> read_tensors(int dir_fd, std::vector<Found>& found, Executor& executor,
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
/// What that node is asked to hash, and what it answered.
std::string hash_request(const Model& model, const FilesElsewhere& node,
                         const std::vector<Found>& found);
Result<> take_hashes(const FilesElsewhere& node, const std::string& answer,
                     std::vector<Found>& found);

}  // namespace ptc
