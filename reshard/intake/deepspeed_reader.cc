#include "reshard/intake/deepspeed_reader.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <unordered_map>
#include <utility>

#include "reshard/checkpoint/dcp_table.h"
#include "reshard/checkpoint/dcp_values.h"
#include "reshard/checkpoint/deepspeed_file.h"
#include "reshard/intake/dcp_files.h"
#include "reshard/intake/file_reads.h"
#include "reshard/intake/tree_format.h"
#include "store/base/json.h"
#include "store/codec/tensor_path.h"
#include "store/codec/torch_path.h"

namespace ptc {
namespace {

constexpr std::string_view kModelStates = "model_states.pt";  // of every rank, whatever its number
constexpr std::string_view kOptimizerSet = "optim.safetensors";
constexpr std::string_view kWholeModelSet = "model.safetensors";
constexpr std::string_view kMasterKey = "fp32", kStepKey = "step";
constexpr uint64_t kMostDeepSpeedValues = 64 << 20;

/// The same file of another data-parallel rank.
std::string file_of_rank(std::string path, uint32_t dp) {
  constexpr std::string_view kRank = "zero_pp_rank_";
  const size_t begin = path.rfind(kRank) + kRank.size();
  return path.replace(begin, path.find('_', begin) - begin, std::to_string(dp));
}

/// Those of ranks from 0 on; names the first that is missing.
Result<> check_ranks_there(const std::map<uint32_t, Found*>& files, uint64_t ranks) {
  for (uint32_t dp = 0; dp < ranks; ++dp)
    if (!files.contains(dp))
      return invalid_argument("{} is missing, and {} is of {} data-parallel ranks",
                              file_of_rank(files.begin()->second->path, dp),
                              files.begin()->second->source(), ranks);
  return ok();
}

/// What the parts of a parameter are called.
class StateNames {
 public:
  /// `model`: the file of torch.save's with the module, if it has tensors.
  explicit StateNames(const Found* model) {
    if (model == nullptr) return;
    naming_ = model->naming;
    for (const TensorEntry& tensor : model->tensors) shapes_.emplace(tensor.name, tensor.shape);
  }
  /// Of files of safetensors, which have names as the module does.
  explicit StateNames(const std::vector<Found>& found) {
    for (const Found& file : found)
      for (const TensorEntry& tensor : file.tensors) shapes_.emplace(tensor.name, tensor.shape);
  }
  /// As `model` has it.
  std::string parameter(const std::string& raw) const {
    if (naming_.whole) return "module." + raw;
    return raw.starts_with(naming_.wrappers) ? raw.substr(naming_.wrappers.size()) : raw;
  }
  /// The parameter's shape there.
  std::optional<Shape> in_model(const std::string& raw) const {
    const auto known = shapes_.find(parameter(raw));
    return known == shapes_.end() ? std::nullopt : std::optional(known->second);
  }
  /// Where there is no model, the fp32 copy is the parameter.
  std::string state(const std::string& raw, std::string_view key) const {
    const std::string name = parameter(raw);
    return key == kMasterKey && !shapes_.contains(name) ? name : fmt::format("{}.{}", name, key);
  }

 private:
  TorchNaming naming_;
  std::unordered_map<std::string, Shape> shapes_;
};

/// Reads the arrays out of files, and says of each which part of which tensor it is.
class TreeTables {
 public:
  void add(Found& file, std::string name, const FlatArray& array, uint64_t at, const Box& box) {
    DcpTable& table = tables_[&file];
    const uint64_t item_bits = dtype_bits(array.dtype);
    table.tensors.push_back({std::move(name), array.dtype, box.extent,
                             array.offset + at * item_bits / 8, box.volume() * item_bits / 8});
    table.boxes.push_back(box);
  }
  /// The elements [begin, end) of a tensor, which are those of the array from `at` on.
  void add_run(Found& file, const std::string& name, const FlatArray& array, uint64_t at,
               const Shape& shape, uint64_t begin, uint64_t end) {
    for (const Box& box : boxes_of_run(shape, begin, end)) {
      add(file, name, array, at, box);
      at += box.volume();
    }
  }
  Result<> add_values(Found& file, DeepSpeedValues values, const std::vector<TorchStep>& below) {
    DcpTable& table = tables_[&file];
    for (auto& [text, archive] : values) {
      value_bytes_ += archive.size();
      if (value_bytes_ > kMostDeepSpeedValues)
        return invalid_argument("{}: what in it is no tensor has more than {} bytes", file.source(),
                                kMostDeepSpeedValues);
      PTC_TRY(auto path, parse_torch_path(text));
      path.insert(path.begin(), below.begin(), below.end());
      table.values.emplace_back(torch_path_text(path), std::move(archive));
    }
    return ok();
  }
  /// A file of which nothing is kept is one, too.
  void has(Found& file) { (void)tables_[&file]; }

  Result<> finish(std::string_view set) {
    std::vector<DcpTable> tables;
    std::vector<const Found*> files;
    for (auto& [file, table] : tables_) {
      for (const TensorEntry& tensor : table.tensors) {
        if (auto path = tensor_path(tensor.name); path.has_error())
          return std::move(path).error().with_context(file->source());
      }
      file->header = dcp_table_text(table);
      file->header_bytes = file->header.size();
      file->tensors = table.tensors;
      file->boxes = table.boxes;
      file->set = set;
      file->has_tensors = true;
      file->told = true;
      // What is laid out for each rank later: what cannot be is refused now.
      auto read = parse_dcp_table(file->header, file->version.bytes);
      if (read.has_error()) return std::move(read).error().with_context(file->source());
      tables.push_back(std::move(read).value());
      files.push_back(file);
    }
    PTC_TRY(check_outlines(files, kMostOutlineBytes));
    PTC_TRY(dcp_values_file(tables));
    return ok();
  }

 private:
  std::map<Found*, DcpTable> tables_;
  uint64_t value_bytes_ = 0;
};

/// One group of parameters of stages 1 and 2, over all ranks.
struct FlatGroup {
  uint64_t elements = 0;   // of its parameters, with gaps between them
  uint64_t partition = 0;  // of each rank's part, with padding

  /// Of a rank's part those that are none of padding.
  uint64_t real(uint64_t dp) const {
    const uint64_t begin = std::min(dp * partition, elements);
    return std::min(elements - begin, partition);
  }
};

class TreeReader {
 public:
  TreeReader(const FileReader& files, DeepSpeedTree tree, Executor& executor, std::stop_token stop)
      : files_(files), tree_(std::move(tree)), executor_(executor), stop_(std::move(stop)) {}
  /// Other files have the model.
  TreeReader(const FileReader& files, DeepSpeedTree tree, StateNames model, Executor& executor,
             std::stop_token stop)
      : TreeReader(files, std::move(tree), executor, std::move(stop)) {
    names_ = std::move(model);
    beside_model_ = true;
  }

  Result<> run(std::vector<Found>& found) {
    if (tree_.universal.empty() && tree_.zero.empty()) {
      if (tree_.models.empty())
        return invalid_argument("{} is of stage 3, and there is no …_optim_states.pt beside it",
                                tree_.zero_models.begin()->second->source());
    } else if (tree_.models.empty() && tree_.zero_models.empty()) {
      return invalid_argument(
          "there is no {}mp_rank_00_model_states.pt, which says how its state is to be read",
          tree_.folder);
    }
    for (Found* file : tree_.again) tables_.has(*file);
    PTC_TRY(read_models());
    if (!tree_.zero.empty()) {
      PTC_TRY(read_zero());
    } else if (!tree_.universal.empty()) {
      PTC_TRY(read_universal());
    }
    const bool of_model =
        beside_model_ || (model_file_ != nullptr && !model_file_->tensors.empty());
    PTC_TRY(tables_.finish(of_model ? kOptimizerSet : kWholeModelSet));
    return settle(found);
  }

 private:
  template <class T, class... More>
  Result<T> read(const Found& file, More... more) {
    PTC_TRY(const ReadAt at, files_.open(file));
    auto done = T::read(at, file.version.bytes, more...);
    if (done.has_error()) return std::move(done).error().with_context(file.source());
    return std::move(done).value();
  }

  Result<> read_models() {
    if (!tree_.zero_models.empty() && !tree_.models.empty())
      return invalid_argument("{} is of stage 3, and {} of another: remove one",
                              tree_.zero_models.begin()->second->source(),
                              tree_.models.begin()->second->source());
    if (tree_.zero_models.empty()) {
      const auto first = tree_.models.find(0);
      if (first == tree_.models.end())
        return invalid_argument("{}mp_rank_00_model_states.pt is missing", tree_.folder);
      PTC_TRY(auto model, read<DeepSpeedModel>(*first->second, false));
      const uint64_t ranks = std::max<uint64_t>(model.model_parallel.value_or(1), 1);
      // A universal folder has all of each parameter, whoever held it; the model's own files stay
      // what they are.
      if (tree_.models.size() > 1 || ranks > 1) {
        if (tree_.universal.empty()) return cut_over_ranks(*first->second);
      } else if (!beside_model_) {
        model_file_ = first->second;
        if (auto done = read_model_file(); done.has_error())
          return std::move(done).error().with_context(model_file_->source());
        if (model_file_->tensors.empty()) model_file_ = nullptr;
      }
      if (!beside_model_) names_ = StateNames(model_file_);
      models_.emplace(0, std::move(model));
      return ok();
    }
    for (const auto& [dp, file] : tree_.zero_models) {
      PTC_TRY(auto model, read<DeepSpeedModel>(*file, dp == 0));
      if (model.model_parallel.value_or(1) > 1 && tree_.universal.empty())
        return cut_over_ranks(*file);
      models_.emplace(dp, std::move(model));
    }
    return check_ranks_there(tree_.zero_models, tree_.zero_models.size());
  }

  static Error cut_over_ranks(const Found& file) {
    return invalid_argument("{} is of a model that is cut over several ranks: {}", file.source(),
                            kMakeUniversal);
  }

  Result<> read_model_file() {
    if (model_file_->node == nullptr) {
      PTC_TRY(read_if_torch(files_.dir_fd(), *model_file_));
    } else if (!model_file_->header.empty()) {
      PTC_TRY(read_outline_elsewhere(*model_file_));
    }
    if (!model_file_->problem.empty()) return invalid_argument("{}", model_file_->problem);
    model_file_->has_tensors = !model_file_->tensors.empty();
    return ok();
  }

  /// The shape that all say a parameter has.
  Result<> check_shape(const std::string& name, const Shape& shape) const {
    const auto in_model = names_.in_model(name);
    if (!in_model && beside_model_)
      return invalid_argument("the files of the model have no {}", ptc::quoted(name));
    if (!in_model || *in_model == shape) return ok();
    return invalid_argument("parameter {} is {} in the module, and {} in param_shapes",
                            ptc::quoted(name), in_model->to_string(), shape.to_string());
  }

  Result<> read_zero() {
    std::vector<Found*> files;
    for (const auto& [dp, file] : tree_.zero) files.push_back(file);
    std::vector<ZeroFile> zero(files.size());
    PTC_TRY(executor_.team().parallel_for(
        files.size(),
        [&](size_t i) -> Result<> {
          PTC_TRY(zero[i], read<ZeroFile>(*files[i]));
          return ok();
        },
        stop_));
    const DeepSpeedModel& model = models_.begin()->second;
    for (size_t i = 0; i < files.size(); ++i) {
      PTC_TRY(check_rank(*files[i], zero[i], zero.front(), model));
    }
    PTC_TRY(check_ranks_there(tree_.zero, files.size()));
    if (zero.front().of_stage_3 == tree_.zero_models.empty())
      return invalid_argument(
          "{} is of another stage of ZeRO than {}", files.front()->source(),
          (tree_.zero_models.empty() ? tree_.models : tree_.zero_models).begin()->second->source());
    if (zero.front().of_stage_3) {
      PTC_TRY(check_ranks_there(tree_.zero_models, files.size()));
      if (tree_.zero_models.size() != files.size())
        return invalid_argument("there are {} files of the model, and {} of its optimizer",
                                tree_.zero_models.size(), files.size());
      PTC_TRY(add_stage_3_models());
    }
    for (size_t g = 0; g < model.groups.size(); ++g) {
      Result<> done = zero.front().of_stage_3 ? add_slices(g, model.groups[g], files, zero)
                                              : add_flat(g, model.groups[g], files, zero);
      if (done.has_error())
        return std::move(done).error().with_context(
            fmt::format("{}, group {}", files.front()->source(), g));
    }
    for (Found* file : files) tables_.has(*file);
    return tables_.add_values(*files.front(), std::move(zero.front().values), {});
  }

  /// One rank's file, beside the first's.
  Result<> check_rank(const Found& file, const ZeroFile& zero, const ZeroFile& first,
                      const DeepSpeedModel& model) const {
    if (zero.of_stage_3 != first.of_stage_3)
      return invalid_argument("{} is of another stage of ZeRO than the first rank's",
                              file.source());
    if (zero.groups.size() != model.groups.size())
      return invalid_argument("{} has {} groups of parameters, and param_shapes of the model {}",
                              file.source(), zero.groups.size(), model.groups.size());
    for (size_t g = 0; g < zero.groups.size(); ++g) {
      const ZeroFile::Group& group = zero.groups[g];
      if (group.partitions && *group.partitions != tree_.zero.size()) {
        PTC_TRY(check_ranks_there(tree_.zero, std::min<uint64_t>(*group.partitions, UINT32_MAX)));
        return invalid_argument(
            "{} says that group {} is cut over {} ranks, and there are files of {}: {}",
            file.source(), g, *group.partitions, tree_.zero.size(), kMakeUniversal);
      }
      const auto keys = [](const ZeroFile::Group& of) {
        std::set<std::string_view> all;
        for (const auto& [key, array] : of.state) all.insert(key);
        return all;
      };
      if (keys(group) != keys(first.groups[g]))
        return invalid_argument("{}: group {} has another state than in the first rank's",
                                file.source(), g);
    }
    if (steps_in(zero) == steps_in(first)) return ok();
    return invalid_argument(
        "{}: its optimizer has taken another number of steps than {}'s: files of two checkpoints "
        "may be mixed",
        file.source(), tree_.zero.begin()->second->source());
  }

  static std::map<std::string_view, std::string_view> steps_in(const ZeroFile& zero) {
    std::map<std::string_view, std::string_view> steps;
    for (const auto& [path, archive] : zero.values)
      if (path.ends_with(".step")) steps.emplace(path, archive);
    return steps;
  }

  /// The arrays of a group on a rank, with their keys.
  static std::vector<std::pair<std::string, FlatArray>> arrays_of(const ZeroFile::Group& group) {
    std::vector<std::pair<std::string, FlatArray>> arrays{{std::string(kMasterKey), group.master}};
    arrays.insert(arrays.end(), group.state.begin(), group.state.end());
    return arrays;
  }

  /// The parts of all ranks behind each other are the parameters behind each other, and padding.
  /// What is saved may be without padding (stages 1 and 2) or with it (bf16 of its own).
  Result<FlatGroup> flat_group(size_t g, const DeepSpeedModel::Shapes& shapes,
                               const std::vector<ZeroFile>& zero) const {
    FlatGroup group;
    const std::vector<uint64_t>& gaps = zero.front().groups[g].gaps;
    if (!gaps.empty() && gaps.size() != shapes.size())
      return invalid_argument(
          "param_alignment_paddings has {} numbers, and there are {} parameters", gaps.size(),
          shapes.size());
    for (const ZeroFile& of_rank : zero)
      if (of_rank.groups[g].gaps != gaps)
        return invalid_argument("its param_alignment_paddings differ between ranks");
    for (size_t p = 0; p < shapes.size(); ++p) {
      PTC_TRY(const uint64_t elements, num_elements(shapes[p].second));
      if (__builtin_add_overflow(group.elements, elements, &group.elements) ||
          (!gaps.empty() && __builtin_add_overflow(group.elements, gaps[p], &group.elements)))
        return invalid_argument("its parameters have too many elements");
    }
    const auto fits = [&](bool saved_padded) {
      const uint64_t first = zero.front().groups[g].master.elements;
      const uint64_t padding = zero.front().groups[g].padding.value_or(0);
      if (padding > uint64_t{1} << 62 || first > uint64_t{1} << 62) return false;
      group.partition = saved_padded ? first : first + padding;
      uint64_t all = 0;
      if (__builtin_mul_overflow(group.partition, zero.size(), &all) || all < group.elements)
        return false;
      for (size_t dp = 0; dp < zero.size(); ++dp) {
        const ZeroFile::Group& of_rank = zero[dp].groups[g];
        const uint64_t real = group.real(dp);
        if (of_rank.master.elements != (saved_padded ? group.partition : real)) return false;
        const uint64_t own = group.partition - real;
        const uint64_t of_last = dp + 1 == zero.size() ? all - group.elements : 0;
        if (of_rank.padding && *of_rank.padding != own &&
            !(saved_padded && *of_rank.padding == of_last))
          return false;
      }
      // Nobody says how much is padding: as much as the alignment explains.
      return zero.front().groups[g].padding || all - group.elements < 2 * zero.size();
    };
    if (fits(false) || fits(true)) return group;
    uint64_t held = 0, padding = 0;
    for (const ZeroFile& of_rank : zero) {
      held += of_rank.groups[g].master.elements;
      padding += of_rank.groups[g].padding.value_or(0);
    }
    return invalid_argument(
        "its parameters have {} elements by param_shapes, and its {} ranks hold {} with {} of "
        "padding by group_paddings, which does not fit: files of two checkpoints may be mixed, or "
        "one is cut short",
        group.elements, zero.size(), held, padding);
  }

  Result<> add_flat(size_t g, const DeepSpeedModel::Shapes& shapes,
                    const std::vector<Found*>& files, const std::vector<ZeroFile>& zero) {
    PTC_TRY(const FlatGroup group, flat_group(g, shapes, zero));
    const std::vector<size_t> order = order_of_slices(g, shapes, zero);
    for (size_t dp = 0; dp < files.size(); ++dp) {
      const uint64_t begin = std::min(dp * group.partition, group.elements);
      const uint64_t real = group.real(dp);
      const ZeroFile::Group& of_rank = zero[dp].groups[g];
      for (const auto& [key, array] : of_rank.state)
        if (array.elements != real && array.elements != group.partition)
          return cannot_be(*files[dp], key, array.elements, real);
      uint64_t at = 0;  // of the parameter in the group
      for (size_t p = 0; p < shapes.size(); ++p) {
        const auto& [name, shape] = shapes[p];
        const uint64_t elements = Box::whole(shape).volume(), end = at + elements;
        const uint64_t from = std::max(at, begin), to = std::min(end, begin + real);
        if (dp == 0) {
          PTC_TRY(check_shape(name, shape));
        }
        if (from < to) {
          for (const auto& [key, array] : arrays_of(of_rank))
            tables_.add_run(*files[dp], names_.state(name, key), array, from - begin, shape,
                            from - at, to - at);
        } else if (elements == 0 && dp == 0) {
          for (const auto& [key, array] : arrays_of(of_rank))
            tables_.add(*files[dp], names_.state(name, key), array, 0, Box::whole(shape));
        }
        at = end + (of_rank.gaps.empty() ? 0 : of_rank.gaps[p]);
      }
      PTC_TRY(check_slices(*files[dp], of_rank, slices_of(shapes, order, of_rank, begin, real)));
    }
    return ok();
  }

  /// In what order of its parameters a group's param_slice_mappings count. The flat array has that
  /// of param_shapes; with "round_robin_gradients" DeepSpeed deals them out to as many hands as
  /// there are ranks and puts the hands behind each other, but what it writes into
  /// param_slice_mappings it counts in the order before.
  static std::vector<size_t> order_of_slices(size_t g, const DeepSpeedModel::Shapes& shapes,
                                             const std::vector<ZeroFile>& zero) {
    std::vector<size_t> as_it_lies(shapes.size());
    std::iota(as_it_lies.begin(), as_it_lies.end(), size_t{0});
    std::unordered_map<std::string_view, size_t> numbers;
    for (size_t p = 0; p < shapes.size(); ++p) numbers.emplace(shapes[p].first, p);
    std::vector<size_t> said;
    for (const ZeroFile& of_rank : zero) {
      if (!of_rank.groups[g].slices || !of_rank.groups[g].gaps.empty()) return as_it_lies;
      for (const ZeroFile::Slice& slice : *of_rank.groups[g].slices) {
        const auto known = numbers.find(slice.parameter);
        if (known == numbers.end()) return as_it_lies;
        if (said.empty() || said.back() != known->second) said.push_back(known->second);
      }
    }
    std::vector<size_t> dealt;
    for (size_t hand = 0; hand < zero.size(); ++hand)
      for (size_t i = hand; i < said.size(); i += zero.size()) dealt.push_back(said[i]);
    return dealt == as_it_lies ? said : as_it_lies;
  }

  /// What a rank has of its group whose elements [begin, begin + real) it has, if its parameters
  /// follow each other in this order.
  static std::vector<ZeroFile::Slice> slices_of(const DeepSpeedModel::Shapes& shapes,
                                                const std::vector<size_t>& order,
                                                const ZeroFile::Group& group, uint64_t begin,
                                                uint64_t real) {
    std::vector<ZeroFile::Slice> slices;
    uint64_t at = 0;
    for (const size_t p : order) {
      const uint64_t end = at + Box::whole(shapes[p].second).volume();
      const uint64_t from = std::max(at, begin), to = std::min(end, begin + real);
      if (from < to) slices.push_back({shapes[p].first, from - begin, to - from});
      at = end + (group.gaps.empty() ? 0 : group.gaps[p]);
    }
    return slices;
  }

  /// Where the file itself says which parameter is where, it must be what param_shapes says.
  static Result<> check_slices(const Found& file, const ZeroFile::Group& group,
                               const std::vector<ZeroFile::Slice>& slices) {
    if (!group.slices) return ok();
    std::map<std::string_view, const ZeroFile::Slice*> said;
    for (const ZeroFile::Slice& slice : *group.slices)
      if (slice.elements > 0) said[slice.parameter] = &slice;
    for (const ZeroFile::Slice& slice : slices) {
      const auto known = said.find(slice.parameter);
      if (known != said.end() && known->second->begin == slice.begin &&
          known->second->elements == slice.elements)
        continue;
      return invalid_argument(
          "{}: by param_shapes of the model it has {} elements of {} at {}, and by its own "
          "param_slice_mappings {}: they are of two checkpoints",
          file.source(), slice.elements, ptc::quoted(slice.parameter), slice.begin,
          known == said.end()
              ? "none"
              : fmt::format("{} at {}", known->second->elements, known->second->begin));
    }
    return ok();
  }

  static Error cannot_be(const Found& file, std::string_view key, uint64_t elements,
                         uint64_t wanted) {
    return invalid_argument(
        "{}: the optimizer's state {} has {} elements, and the parameters that it is of {}: it is "
        "not theirs element by element, and cannot be cut",
        file.source(), ptc::quoted(std::string(key)), elements, wanted);
  }

  /// Stage 3: of each parameter every rank has ⌈elements ÷ ranks⌉, of the last fewer and padding.
  Result<> add_slices(size_t g, const DeepSpeedModel::Shapes& shapes,
                      const std::vector<Found*>& files, const std::vector<ZeroFile>& zero) {
    uint64_t wanted = 0;
    for (const auto& [name, shape] : shapes) {
      PTC_TRY(const uint64_t elements, num_elements(shape));
      if (__builtin_add_overflow(wanted, slice_elements(elements), &wanted))
        return invalid_argument("its parameters have too many elements");
    }
    for (size_t dp = 0; dp < files.size(); ++dp) {
      const auto arrays = arrays_of(zero[dp].groups[g]);
      for (const auto& [key, array] : arrays)
        if (array.elements != wanted) return cannot_be(*files[dp], key, array.elements, wanted);
      uint64_t at = 0;
      for (const auto& [name, shape] : shapes) {
        if (beside_model_) {
          PTC_TRY(check_shape(name, shape));
        }
        add_slice(*files[dp], dp, name, shape, at, arrays);
        at += slice_elements(Box::whole(shape).volume());
      }
    }
    return ok();
  }
  uint64_t slice_elements(uint64_t elements) const {
    const uint64_t ranks = models_.size();
    return elements / ranks + (elements % ranks != 0);
  }
  void add_slice(Found& file, uint64_t dp, const std::string& name, const Shape& shape, uint64_t at,
                 const std::vector<std::pair<std::string, FlatArray>>& arrays) {
    const uint64_t elements = Box::whole(shape).volume(), each = slice_elements(elements);
    const uint64_t begin = std::min(dp * each, elements), end = std::min(begin + each, elements);
    for (const auto& [key, array] : arrays) {
      if (elements == 0 && dp == 0) {
        tables_.add(file, names_.state(name, key), array, 0, Box::whole(shape));
      } else {
        tables_.add_run(file, names_.state(name, key), array, at, shape, begin, end);
      }
    }
  }

  /// Their module is empty but for buffers; what is not trained is there in slices.
  Result<> add_stage_3_models() {
    for (auto& [dp, model] : models_) {
      Found& file = *tree_.zero_models.at(dp);
      tables_.has(file);
      const std::map<std::string_view, FlatArray> parts(model.frozen_parts.begin(),
                                                        model.frozen_parts.end());
      for (const auto& [name, shape] : models_.begin()->second.frozen) {
        const auto part = parts.find(name);
        const uint64_t each = slice_elements(Box::whole(shape).volume());
        if (beside_model_) break;
        if (part == parts.end() || part->second.elements != each)
          return invalid_argument("{} has not {} elements of {}, which is not trained",
                                  file.source(), each, ptc::quoted(name));
        add_slice(file, dp, name, shape, 0, {{std::string(kMasterKey), part->second}});
      }
      if (dp > 0) continue;
      for (const DeepSpeedModel::Buffer& buffer : model.buffers)
        if (!beside_model_)
          tables_.add(file, names_.parameter(buffer.name), buffer.array, 0,
                      Box::whole(buffer.shape));
      DeepSpeedValues values = std::move(model.values);
      PTC_TRY(tables_.add_values(file, std::move(values), {}));
    }
    return ok();
  }

  Result<> read_universal() {
    struct One {
      const std::string* parameter;
      std::string state;
      Found* file;
      UniversalState content = {};
    };
    std::vector<One> all;
    std::set<std::string> states;
    for (const auto& [parameter, files] : tree_.universal)
      for (const auto& [state, file] : files) {
        all.push_back({&parameter, state, file});
        states.insert(state);
      }
    PTC_TRY(executor_.team().parallel_for(
        all.size(),
        [&](size_t i) -> Result<> {
          PTC_TRY(all[i].content, read<UniversalState>(*all[i].file));
          return ok();
        },
        stop_));
    std::map<std::string, Shape> shapes;  // as the model's files say, where they do
    for (const auto& group : models_.begin()->second.groups)
      for (const auto& [name, shape] : group) shapes.emplace(name, shape);
    for (const auto& [name, shape] : shapes)
      if (model_file_ != nullptr && !tree_.universal.contains(name))
        return invalid_argument("{}zero/{}/ is missing, and param_shapes of the model names it",
                                tree_.folder, name);
    for (const auto& [parameter, files] : tree_.universal)
      for (const std::string& state : states)
        if (!files.contains(state))
          return invalid_argument("{}zero/{}/{}.pt is missing, and other parameters have such",
                                  tree_.folder, parameter, state);
    if (!states.contains(std::string(kMasterKey)))
      return invalid_argument("{}zero/ has no fp32.pt of any parameter", tree_.folder);
    if (!tree_.zero_models.empty()) {
      PTC_TRY(add_stage_3_models());
    }
    // Of tensors nobody reads at LEFT_OUT.txt whether they differ: two that do are values, too.
    One* counted = nullptr;
    for (One& one : all) {
      if (one.state != kStepKey || one.content.number.empty()) continue;
      if (counted == nullptr) counted = &one;
      if (counted->content.number == one.content.number) continue;
      for (One* each : {counted, &one}) each->content.values.emplace_back("", each->content.number);
      break;
    }
    for (One& one : all) {
      if (auto done = add_state(*one.file, *one.parameter, one.state, one.content, shapes);
          done.has_error())
        return std::move(done).error().with_context(one.file->source());
      tables_.has(*one.file);
      PTC_TRY(tables_.add_values(
          *one.file, std::move(one.content.values),
          {{TorchStep::Kind::kKey, *one.parameter, 0}, {TorchStep::Kind::kKey, one.state, 0}}));
    }
    return ok();
  }

  Result<> add_state(Found& file, const std::string& parameter, const std::string& state,
                     const UniversalState& content, const std::map<std::string, Shape>& shapes) {
    if (!content.array) {
      if (state == kMasterKey) return invalid_argument("there is no tensor in it");
      return ok();
    }
    Shape shape = content.shape;
    // Of stage 3 they are flat.
    if (const auto said = shapes.find(parameter);
        said != shapes.end() && model_file_is_whole() && shape != said->second && !shape.empty()) {
      PTC_TRY(const uint64_t elements, num_elements(said->second));
      if (shape.size() != 1 || shape[0] != elements)
        return invalid_argument("it is {}, and its parameter {}", shape.to_string(),
                                said->second.to_string());
      shape = said->second;
    }
    if (state == kMasterKey) {
      PTC_TRY(check_shape(parameter, shape));
    }
    tables_.add(file, names_.state(parameter, state), *content.array, 0, Box::whole(shape));
    return ok();
  }
  /// Whether its shapes are those of whole parameters: it is of one rank, or of stage 3.
  bool model_file_is_whole() const {
    const auto ranks = models_.begin()->second.model_parallel.value_or(1);
    return !tree_.zero_models.empty() || (tree_.models.size() == 1 && ranks <= 1);
  }

  /// All are the first rank's, under names without what only told them apart.
  Result<> settle(std::vector<Found>& found) {
    const auto rename = [&](Found& file, std::string path) {
      file.at = file.source();
      file.rank = 0;
      file.path = std::move(path);
    };
    for (const auto& [mp, file] : tree_.models)
      if (!beside_model_)
        rename(*file, tree_.models.size() == 1 ? std::string(kModelStates)
                                               : file->path.substr(tree_.folder.size()));
    for (const auto& files : {tree_.zero, tree_.zero_models})
      for (const auto& [dp, file] : files) rename(*file, file->path.substr(tree_.folder.size()));
    for (Found* file : tree_.again) rename(*file, file->path.substr(tree_.folder.size()));
    // In one directory, so that what is no tensor is in one file there.
    for (const auto& [parameter, files] : tree_.universal)
      for (const auto& [state, file] : files)
        rename(*file, fmt::format("zero/{}.{}.pt", parameter, state));
    if (tree_.optimizer != nullptr)
      rename(*tree_.optimizer, tree_.optimizer->path.substr(tree_.folder.size()));
    std::map<std::pair<uint64_t, std::string_view>, const Found*> paths;
    for (const Found& file : found) {
      const auto [other, is_new] = paths.try_emplace({file.rank, file.path}, &file);
      if (!is_new)
        return invalid_argument("{} and {} would both be {}: move one away",
                                other->second->source(), file.source(), file.path);
    }
    for (const Found& file : found)
      if (const auto other = paths.find({0, file.set}); !file.set.empty() && other != paths.end())
        return invalid_argument("{} would be part of a {}, which is there too: move it away",
                                file.source(), file.set);
    std::stable_sort(found.begin(), found.end(), [](const Found& a, const Found& b) {
      return std::tie(a.rank, a.path) < std::tie(b.rank, b.path);
    });
    return ok();
  }

  const FileReader& files_;
  DeepSpeedTree tree_;
  Executor& executor_;
  std::stop_token stop_;
  bool beside_model_ = false;    // what DeepSpeed saved of it is kept as it is
  Found* model_file_ = nullptr;  // with the module's tensors, cut as torch.save's
  std::map<uint32_t, DeepSpeedModel> models_;
  StateNames names_ = StateNames(nullptr);
  TreeTables tables_;
};

}  // namespace

Result<> read_deepspeed_tree(const FileReader& files, DeepSpeedTree tree, std::vector<Found>& found,
                             bool beside_model, Executor& executor, std::stop_token stop) {
  if (!beside_model) {
    PTC_TRY(TreeReader(files, std::move(tree), executor, std::move(stop)).run(found));
  } else {
    StateNames model(found);
    PTC_TRY(
        TreeReader(files, std::move(tree), std::move(model), executor, std::move(stop)).run(found));
  }
  for (Found& file : found)
    if (!file.has_tensors) keep_as_it_is(file);
  return ok();
}

}  // namespace ptc
