// What of a checkpoint never changes: its manifest and headers, and what follows from them.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "reshard/checkpoint/manifest.h"
#include "reshard/checkpoint/shared_results.h"
#include "store/base/error.h"

namespace ptc {

/// Read out of the files of a checkpoint; all that read the same share one.
/// Threads: any.
class CheckpointFacts {
 public:
  /// `headers` are the headers of the written files, one behind the other; `text` is that of the
  /// manifest.
  static Result<std::shared_ptr<const CheckpointFacts>> read(std::string_view text,
                                                             std::string headers,
                                                             SharedResults& results);
  static Result<std::shared_ptr<const CheckpointFacts>> of(Manifest manifest, std::string_view text,
                                                           std::string headers,
                                                           SharedResults& results);
  CheckpointFacts(Manifest manifest_given, std::string headers_given, std::string key_given);

  const Manifest manifest;
  const std::string headers;
  const std::string key;  // no other's
  const std::vector<TensorFacts> tensors;
  std::vector<std::string> model_paths;  // by tensor: its path under model/
  std::vector<bool>
      primary;  // by tensor: of those of its name the one that has it in model/ and hf/
  /// Tensors that hf/ is without.
  struct LeftOut {
    std::string file;
    bool same_names;  // as parameters of another file, and other bytes; else they are optimizer
                      // state
    uint64_t tensors = 0;
  };
  std::vector<LeftOut> left_out;  // by file
  /// Files of ZeRO's that are kept as they were written, because others have the tensors.
  struct Uncut {
    std::string first;  // the path of one
    uint64_t files = 0;
  };
  Uncut zero_uncut;
  /// Where in a rank's directory Megatron's own file is ("", "x/"); nullopt: it is not of
  /// Megatron's.
  std::optional<std::string> megatron_directory;
  /// Where Megatron's own distributed checkpoint is in a rank's directory ("iter_0000100/"), with
  /// its common.pt; nullopt: there is none.
  std::optional<std::string> torch_dist_directory;
  /// What all written files that have the tensor, as far as their name tells, allow.
  const ReadRights& rights_of(uint32_t tensor) const {
    return rights_in(manifest.model->tensors()[tensor].file);
  }
  /// The same by the name of a file with tensors; of an unknown one: what all files allow.
  const ReadRights& rights_in(const std::string& file) const {
    const auto found = rights_by_file_.find(file);
    return found == rights_by_file_.end() ? rights_of_all_ : found->second;
  }

  /// meta.json, made when it is first asked for.
  const std::string& meta_json() const;

  /// By tensor: its name's place in the order of all names (store/codec/name_order.h), made when it
  /// is first asked for. A layout's files have their names in this order, and need not sort them.
  const std::vector<uint32_t>& name_places() const;

 private:
  template <class GiveManifest>
  static Result<std::shared_ptr<const CheckpointFacts>> get(std::string_view text,
                                                            std::string headers,
                                                            SharedResults& results,
                                                            GiveManifest&& give);
  void find_primary(const std::vector<bool>& parameters);
  void find_left_out(const std::vector<bool>& parameters);
  void find_zero_uncut();
  void find_torch_dist();
  std::string make_meta_json() const;
  std::unordered_map<std::string, ReadRights> rights_by_file_;
  ReadRights rights_of_all_;
  mutable std::once_flag meta_made_;
  mutable std::string meta_json_;
  mutable std::once_flag places_made_;
  mutable std::vector<uint32_t> name_places_;
};

}  // namespace ptc
