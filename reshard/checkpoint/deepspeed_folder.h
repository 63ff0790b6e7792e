// A checkpoint as one of DeepSpeed's universal ones: what its engine loads with "load_universal",
// under any stage of ZeRO and on any number of ranks.
//
//   latest_universal                                    the tag
//   <tag>/mp_rank_00_model_states.pt                    what is no tensor; the module is empty, for
//   <tag>/zero_pp_rank_0_mp_rank_00_model_states.pt     nobody reads it (stage 3 looks for this)
//   <tag>/zero/optimizer_state.pt                       what the optimizer has beside parameters
//   <tag>/zero/<parameter>/{fp32,exp_avg,…,step}.pt     whole tensors
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "reshard/checkpoint/dcp_table.h"
#include "reshard/plan/source_index.h"
#include "reshard/ptc/model.h"
#include "store/base/error.h"

namespace ptc {

/// What was written beside tensors, and by whom.
struct DeepSpeedSources {
  /// By exact path (torch_path.h) an archive of torch.save's.
  using Values = std::vector<std::pair<std::string, std::string>>;
  Values model_values;  // of the model's own file
  /// Of what was saved in parts, by directory: DcpTable::values.
  std::map<std::string, std::vector<DcpTable>> tables;
  /// By tensor what the module calls it, where a file has said so.
  std::unordered_map<uint32_t, std::string> module_names;
  std::vector<uint32_t> parameters;   // tensors of the model, buffers among them
  std::optional<uint64_t> iteration;  // if somebody else than DeepSpeed says it
  /// Of a universal folder: its name, and that files of the model are kept as they are.
  std::string tag = {};
  bool has_models = false;
};

/// How many ranks share the model (tensor parallel, stages), and how many have the same.
struct DeepSpeedRanks {
  uint32_t model_parallel = 1, data_parallel = 1;
};

class DeepSpeedFolder {
 public:
  /// `zero/<parameter>/<state>.pt`.
  struct File {
    std::string path;  // below the tag's directory
    uint32_t tensor = kNone;
    uint64_t bytes = 0;
    uint32_t kind = 0;  // those of one kind differ in the tensor alone
  };
  /// `tensor` of a file with a value alone.
  static constexpr uint32_t kNone = UINT32_MAX;

  /// `model` outlives it.
  static Result<std::shared_ptr<const DeepSpeedFolder>> make(const Model& model,
                                                             const DeepSpeedSources& sources,
                                                             DeepSpeedRanks ranks);

  const std::string& tag() const { return tag_; }
  const std::vector<File>& files() const { return files_; }
  /// Of one of files(). Made when it is asked for, as there are several for each parameter.
  Result<ImageLayout> lay_out(const File& file) const;
  const std::shared_ptr<const std::string>& model_states() const { return model_states_; }
  const ImageLayout& optimizer_state() const { return optimizer_state_; }
  /// Lines that say what is not in it, and why.
  const std::string& left_out() const { return left_out_; }

 private:
  class Maker;
  struct Kind {
    DcpTable beside;    // values in the same file
    bool bare = false;  // the tensor is not in a dict
  };
  explicit DeepSpeedFolder(const Model& model) : model_(model) {}

  const Model& model_;
  std::string tag_, left_out_;
  std::vector<File> files_;
  std::vector<Kind> kinds_;
  std::shared_ptr<const std::string> model_states_;
  ImageLayout optimizer_state_;
};

}  // namespace ptc
