// What frameworks leave in incoming/<name>/, each kind of tree behind one interface: how it is
// known, what its files are called and of which ranks they are, what is in them, under which layout
// they were written, and whether all is there. (What a single file is says
// checkpoint/file_format.h.)
//
// A commit goes by steps, and asks every row of the table at each: one does what its kind needs
// there, and leaves all else as it is. The methods below are in the order of the steps. A new
// kind is a source with such a class, and a row in tree_format.cc.
#pragma once

#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "reshard/exec/executor.h"
#include "reshard/intake/file_reads.h"
#include "reshard/intake/found_files.h"
#include "reshard/ptc/layout.h"
#include "store/base/error.h"

namespace ptc {

/// Names in a directory, sorted.
Result<std::vector<std::string>> names_in(int dir_fd, const std::string& path);

/// The names in the directory that is committed, and a directory deeper, as they are looked at
/// before any file is.
class NamesThere {
 public:
  NamesThere(int dir_fd, const std::vector<std::string>& top) : dir_fd_(dir_fd), top_(top) {}
  const std::vector<std::string>& top() const { return top_; }  // sorted
  /// nullopt: there is no such directory.
  std::optional<std::vector<std::string>> in(const std::string& name) const;
  /// Whatever it is.
  bool has(const std::string& path) const;
  bool has_file(const std::string& path) const;

 private:
  const int dir_fd_;
  const std::vector<std::string>& top_;
};

/// Stateless; threads: any.
class TreeFormat {
 public:
  virtual ~TreeFormat() = default;
  virtual std::string_view name() const = 0;

  // What is there, on each node by itself.

  /// Whether a tree of this kind lies in the place of rank/. The first row that says so has it.
  /// `beside_others`: other nodes may have the rest of it.
  virtual bool is_there(const NamesThere&, bool /*beside_others*/) const { return false; }
  /// Whether a file of this name is a part of such a tree, which nothing can be made of without
  /// the rest, and why it is refused where is_there() says no.
  virtual bool is_part(std::string_view /*path*/) const { return false; }
  virtual Error without_rest(std::string_view path) const;
  /// Gives files the names that they have in a checkpoint, and what lies `in_place` of rank/ a
  /// number of its own for each rank, until settle() knows these. Asked with in_place of the row
  /// that has the tree, else of all.
  virtual Result<> name_files(bool /*in_place*/, std::vector<Found>&) const { return ok(); }
  /// Marks what belongs together, as far as this node's files say.
  virtual Result<> find_sets(int /*dir_fd*/, std::vector<Found>&) const { return ok(); }

  // With the files of all nodes, before they are read.

  /// Whether a file in the place of rank/ shows that a framework left what lies there.
  virtual bool shows(const Found&) const { return false; }
  /// Whether what lies in the place of rank/ says by itself what is of which rank. All else there
  /// is of one process.
  virtual bool says_ranks(const std::vector<Found>&) const { return false; }
  /// The layout that counts instead of the one in force, if that is known by now. `said`: a
  /// layout.json says one.
  virtual std::optional<LayoutSpec> layout(bool /*said*/, const std::vector<Found>&) const {
    return std::nullopt;
  }
  /// Marks what belongs together, and gives what lies in the place of rank/ numbers of all nodes.
  virtual Result<> join_sets(std::vector<Found>&) const { return ok(); }
  virtual Result<> check_names(const std::vector<Found>&) const { return ok(); }

  // What is in them.

  /// Whether the files with tensors are of this kind, and read by it: the first row that says so
  /// has them, and what is no tensor to it is kept as it is.
  virtual bool reads(const std::vector<Found>&) const { return false; }
  /// kInvalidArgument: what is missing, does not fit together, or is not supported, and what to do.
  virtual Result<> read(const FileReader& files, std::vector<Found>& found, Executor& executor,
                        std::stop_token stop) const;
  /// Whether a file of torch.save's is none that can be read alone, and read_rest() reads it.
  virtual bool is_read_later(std::string_view /*path*/) const { return false; }
  /// Once torch.save's files on this node are read.
  virtual Result<> read_rest(int /*dir_fd*/, std::vector<Found>&) const { return ok(); }

  // Once all are read.

  /// Checks that all of it is there, and gives files their ranks. `said`: `spec` is what the writer
  /// says of himself; else what the files say counts, and becomes `spec`.
  virtual Result<> settle(bool /*said*/, LayoutSpec& /*spec*/, std::vector<Found>&) const {
    return ok();
  }
  /// Compares what the files say of each other with what they have.
  virtual Result<> check_whole(const std::vector<Found>&) const { return ok(); }
  /// The model's config.json. `beside`: that which lies there, or a row before this has said.
  virtual std::string config(const std::vector<Found>&, std::string beside) const { return beside; }
};

const TreeFormat& megatron_trees();    // Megatron-LM's own (megatron_tree.h)
const TreeFormat& deepspeed_trees();   // DeepSpeed's folders (deepspeed_tree.h)
const TreeFormat& safetensors_sets();  // files of safetensors, with an index, numbers or alone
const TreeFormat& dcp_trees();         // PyTorch's distributed checkpointing (dcp_files.h)
const TreeFormat& plain_files();       // all else: arrays, or what torch.save wrote

/// All rows, in the order in which they are asked.
std::span<const TreeFormat* const> tree_formats();

/// Of such parts whose they are; null: of none.
const TreeFormat* tree_of_part(std::string_view path);
/// Whether a row says so.
bool is_read_later(std::string_view path);

/// Calls step(row) for each, until one fails.
template <class Step>
Result<> for_each_tree(const Step& step) {
  for (const TreeFormat* tree : tree_formats()) {
    PTC_TRY(step(*tree));
  }
  return ok();
}

/// The first row of which says(row); null: none.
template <class Says>
const TreeFormat* find_tree(const Says& says) {
  for (const TreeFormat* tree : tree_formats())
    if (says(*tree)) return tree;
  return nullptr;
}

}  // namespace ptc
