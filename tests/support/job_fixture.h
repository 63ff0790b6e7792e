// A job store in a directory of its own, and checkpoints to put into it.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "reshard/node/job_store.h"
#include "reshard/ptc/model.h"
#include "store/codec/safetensors.h"
#include "tests/support/random_model.h"

namespace ptc::testing {

/// A directory that goes with the object.
class TempDir {
 public:
  TempDir();
  ~TempDir();
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

/// A file of the given content; directories are made.
void write_file(const std::filesystem::path& path, const std::string& content);
std::string read_file(const std::filesystem::path& path);

/// PTC_SEED, or a fresh one; printed by whoever uses it.
uint64_t test_seed();

/// A whole model: tensors and all their bytes.
struct Sample : RandomModel {
  std::vector<std::string> bytes;  // by tensor, C order
};

/// Gives the model random bytes.
Sample make_sample(std::mt19937_64& random, RandomModel model);
/// A Llama of 2 layers with 4 heads, 2 key-value heads and a vocabulary of 101.
Sample llama_sample(bool with_optimizer = false, uint32_t layers = 2);

/// A safetensors file as the reference writer makes it: no padding to pages, its own order.
std::string safetensors_file(const std::vector<TensorEntry>& entries,
                             const std::vector<std::string>& bytes,
                             const std::map<std::string, std::string>& metadata = {});

/// The same as torch.save makes it: {"model": {name: tensor}, "epoch": …}.
std::string torch_file(const std::vector<TensorEntry>& entries,
                       const std::vector<std::string>& bytes);
/// Has all tensors in torch's files, "model.pt" for "model.safetensors".
void use_torch_files(Sample& sample);

/// What the oracle says a rank's files are: file → tensor name → part.
struct SlowPart {
  std::vector<uint64_t> shape;
  std::string bytes;
  DType dtype = DType::kF32;
};
using RankParts = std::map<std::string, std::map<std::string, SlowPart>>;
RankParts slow_rank(const Sample& sample, const LayoutSpec& spec, uint64_t rank);

/// Writes rank/<r>/ of every rank, and config.json into rank/0, as a training job would. Returns
/// the content of every file by "<r>/<path>".
std::map<std::string, std::string> write_ranks(const Sample& sample, const LayoutSpec& spec,
                                               const std::filesystem::path& dir);

/// The whole content of a file of a set, by its path; fails the test when it is not there.
std::string read_content(const FileSet& set, const std::string& path);

/// Every rank's files and sub-tensors under `spec` are what the oracle says.
void expect_layout(const Checkpoint& checkpoint, const Sample& sample, const LayoutSpec& spec);
/// model/ has every tensor whole.
void expect_model(const Checkpoint& checkpoint, const Sample& sample);

}  // namespace ptc::testing
