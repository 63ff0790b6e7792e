#include "reshard/checkpoint/torch_merge.h"

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "reshard/checkpoint/megatron_optimizer.h"
#include "reshard/checkpoint/torch_names.h"
#include "store/base/json.h"
#include "store/codec/pickle_writer.h"
#include "store/codec/torch_compose.h"
#include "store/codec/torch_file.h"

namespace ptc {
namespace {

/// The path with the numbers of a name that differs in numbers alone (a stage's own ones); false:
/// it has not as many.
bool renumber(std::vector<TorchStep>& path, std::string_view name) {
  constexpr std::string_view kDigits = "0123456789";
  auto next = [&]() -> std::optional<std::string> {
    const size_t begin = name.find_first_of(kDigits);
    if (begin == name.npos) return std::nullopt;
    const size_t end = std::min(name.find_first_not_of(kDigits, begin), name.size());
    std::string number(name.substr(begin, end - begin));
    name.remove_prefix(end);
    return number;
  };
  for (TorchStep& step : path) {
    if (step.kind != TorchStep::Kind::kKey && step.kind != TorchStep::Kind::kTypesKey) {
      const auto number = next();
      if (!number || number->size() > 18) return false;
      step.number = std::stoll(*number);
      continue;
    }
    std::string key;
    for (size_t at = 0; at < step.key.size();) {
      const size_t begin = std::min(step.key.find_first_of(kDigits, at), step.key.size());
      key.append(step.key, at, begin - at);
      if (begin == step.key.size()) break;
      const auto number = next();
      if (!number) return false;
      key += *number;
      at = std::min(step.key.find_first_not_of(kDigits, begin), step.key.size());
    }
    step.key = std::move(key);
  }
  return !next();
}

class TorchMerge {
 public:
  explicit TorchMerge(std::span<const NewArray> arrays) : arrays_(arrays), left_(arrays.size()) {
    for (uint32_t i = 0; i < arrays.size(); ++i) {
      by_name_.emplace(arrays[i].name, i);
      const size_t chunk = megatron_chunk_bytes(arrays[i].name);
      chunks_.emplace(arrays[i].name.substr(0, chunk));
      has_chunks_ = has_chunks_ || chunk > 0;
    }
    placed_.resize(arrays.size());
  }
  bool is_complete() const { return left_ == 0; }

  Result<> add(WrittenTorchFileRef written) {
    const bool first = files_.empty();
    files_.push_back(written);
    const TorchFile& file = written->file();
    is_megatron_ = is_megatron_ || written->model().megatron.has_value();
    const bool other_chunks = is_megatron_ && written->model().megatron &&
                              (has_chunks_ || !written->model().megatron->chunks.empty());
    if (written->model().optimizer && optimizer_) optimizer_->add(*written->model().optimizer);
    else if (written->model().optimizer) optimizer_ = written->model().optimizer;
    Tensors tensors;
    for (size_t i = 0; i < written->model().numbers.size(); ++i) {
      const std::string_view name = written->model().names[i];
      std::vector<TorchStep> path = file.path(file.tensors()[written->model().numbers[i]].place);
      const auto found = by_name_.find(name);
      const bool take = found != by_name_.end() && !placed_[found->second];
      note(tensors, path, take);
      if (found == by_name_.end()) names_elsewhere_.insert(std::string(name));
      kinds_.try_emplace(without_numbers(name), path);
      if (is_megatron_)
        modules_with_tensors_.insert(
            module_of(without_layer(name.substr(megatron_chunk_bytes(name)))));
      if (!take) continue;
      placed_[found->second] = true;
      --left_;
      place(std::move(path), found->second);
    }
    for (const TorchLiteral& literal : file.literals()) {
      std::vector<TorchStep> path = file.path(literal.place);
      // What is beside tensors is where its module is, whatever the dict that it was in is called.
      const bool of_module = is_megatron_ && is_beside_tensors(path);
      if (path.empty() ||
          (!(of_module && other_chunks) && !comes(tensors, path, path.size() - 1, first)))
        continue;
      if (take_parameters(path, file.pickle(), literal.node)) continue;
      if (of_module) {
        const std::string& name = path.back().key;
        if (layer_in(name).second > 0 && !file.pickle().is(literal.node, PickleKind::kNone))
          return invalid_argument(
              "{} is a layer's own and no tensor: it cannot be in a file with other layers",
              ptc::quoted(torch_name(path)));
        of_modules_.try_emplace(without_layer(name), path, &file.pickle(), literal.node);
        continue;
      }
      const bool empty = is_empty(file.pickle(), literal.node);
      (empty ? empties_ : literals_)
          .push_back({{std::move(path), &file.pickle(), literal.node}, nullptr, 0, files_.size()});
    }
    for (const TorchPair& pair : file.pairs()) {
      std::vector<TorchStep> path = file.path(pair.place);
      if (!comes(tensors, path, path.size(), first)) continue;
      PickleWriter key;
      PTC_TRY(PickleValues(file.pickle(), key).write(pair.key));
      if (!pairs_.insert(torch_path_text(path) + '/' + std::move(key).finish()).second) continue;
      Own own{{std::move(path), &file.pickle(), pair.node}, nullptr, 0, files_.size()};
      own.value.key = pair.key;
      literals_.push_back(std::move(own));
    }
    if (!first) return ok();
    for (const TorchOpaque& opaque : file.opaque())
      return invalid_argument("what is at {} cannot be in a file with other tensors: {}",
                              ptc::quoted(opaque.name), opaque.reason);
    std::unordered_set<uint32_t> of_model(written->model().numbers.begin(),
                                          written->model().numbers.end());
    for (uint32_t i = 0; i < file.tensors().size(); ++i) {
      const TorchTensor& tensor = file.tensors()[i];
      if (of_model.contains(i)) continue;
      Own own{{file.path(tensor.place)}, written.get(), tensor.offset, files_.size()};
      own.value.dtype = tensor.dtype;
      own.value.shape = tensor.shape;
      if (!own.value.path.empty()) literals_.push_back(std::move(own));
    }
    return ok();
  }

  Result<FileLayout> lay_out() && {
    for (uint32_t i = 0; i < arrays_.size(); ++i) {
      if (placed_[i]) continue;
      const auto kind = kinds_.find(without_numbers(arrays_[i].name));
      if (is_megatron_) {
        place(path_in_model(arrays_[i].name), i);
        continue;
      }
      std::vector<TorchStep> path;
      if (kind != kinds_.end()) path = kind->second;
      if (kind == kinds_.end() || !renumber(path, arrays_[i].name))
        return invalid_argument("no file that was written says where tensor {} belongs",
                                ptc::quoted(arrays_[i].name));
      place(std::move(path), i);
    }
    if (is_megatron_) put_in_order();
    if (optimizer_) {
      PTC_TRY(place_state());
    }
    for (const TorchPathValue& value : values_) occupy(value.path, 0);
    owner_.resize(values_.size());
    if (is_megatron_) place_of_modules();
    place_parameters();
    for (const Own& own : literals_) place(own);
    for (const Own& own : empties_) place(own);
    PTC_TRY(auto made, compose_torch_file(values_));
    std::vector<uint64_t> offsets(arrays_.size());
    std::vector<Literals::Piece> bytes;
    for (size_t v = 0; v < values_.size(); ++v) {
      if (v < array_.size()) {
        offsets[array_[v]] = made.tensors[v].offset;
      } else if (owner_[v] != nullptr && owner_[v]->file != nullptr) {
        PTC_TRY(auto copy, owner_[v]->file->bytes(owner_[v]->offset, made.tensors[v].bytes));
        bytes.push_back({made.tensors[v].offset, std::move(copy)});
      }
    }
    return finish_torch_layout(std::move(made), std::move(offsets), std::move(bytes));
  }

 private:
  /// What is no tensor of the model: a value of a pickle, or a tensor with the bytes at `offset`.
  struct Own {
    TorchPathValue value;
    const WrittenTorchFile* file;
    uint64_t offset;
    size_t of;  // the number of its file, from 1 on
  };
  /// A value beside the tensors of a module.
  struct OfModule {
    std::vector<TorchStep> path;
    const Pickle* pickle;
    PickleId node;
    OfModule(std::vector<TorchStep> path_given, const Pickle* pickle_given, PickleId node_given)
        : path(std::move(path_given)), pickle(pickle_given), node(node_given) {}
  };
  /// By the text of a path: the model's tensors below it in one file.
  struct Below {
    bool directly = false, taken = false;
  };
  using Tensors = std::unordered_map<std::string, Below>;
  /// The parameters of a group.
  struct Parameters {
    std::vector<TorchStep> path;
    struct One {
      const Pickle* pickle;
      PickleId node;
      TorchStep key;
    };
    size_t of = 0;  // the first file that has them
    std::vector<One> all;
    std::unordered_set<std::string> known;
  };

  void note(Tensors& tensors, std::vector<TorchStep> path, bool take) {
    for (bool directly = true; !path.empty(); directly = false) {
      if (!take) elsewhere_.insert(torch_path_text(path));
      path.pop_back();
      Below& below = tensors[torch_path_text(path)];
      below.directly = below.directly || directly;
      below.taken = below.taken || take;
    }
  }
  /// Whether a value in the container that is `depth` steps down `path` comes with the tensors that
  /// are taken.
  static bool comes(const Tensors& tensors, std::vector<TorchStep> path, size_t depth, bool first) {
    for (path.resize(depth); !path.empty(); path.pop_back()) {
      const auto found = tensors.find(torch_path_text(path));
      if (found == tensors.end()) continue;
      return found->second.taken || (first && !found->second.directly);
    }
    return true;
  }
  static bool is_empty(const Pickle& pickle, PickleId node) {
    return (pickle.is(node, PickleKind::kDict) || pickle.is(node, PickleKind::kList)) &&
           !pickle.changes(node).more();
  }

  /// Whether it is the list of a group's parameters, by name or number.
  bool take_parameters(const std::vector<TorchStep>& path, const Pickle& pickle, PickleId node) {
    const size_t size = path.size();
    if (optimizer_ && size >= 3 && path[size - 1].key == "params" &&
        path[size - 3].key == "param_groups")
      return true;  // place_state() makes it anew
    if (size < 3 || path[size - 1].key != "params" || path[size - 3].key != "param_groups" ||
        !pickle.is(node, PickleKind::kList))
      return false;
    std::vector<Parameters::One> all;
    bool named = true;
    (void)pickle.for_items(node, [&](PickleId item) -> Result<> {
      if (pickle.is(item, PickleKind::kText))
        all.push_back({&pickle, item, {TorchStep::Kind::kKey, std::string(pickle.text(item)), 0}});
      else if (pickle.is(item, PickleKind::kInt))
        all.push_back({&pickle, item, {TorchStep::Kind::kNumberKey, {}, pickle.integer(item)}});
      else named = false;
      return ok();
    });
    if (!named) return false;
    const auto [found, is_new] = parameters_.try_emplace(torch_path_text(path));
    Parameters& parameters = found->second;
    if (is_new) parameters.path = path, parameters.of = files_.size();
    for (Parameters::One& one : all)
      if (parameters.known.insert(torch_path_text(std::span(&one.key, 1))).second)
        parameters.all.push_back(std::move(one));
    return true;
  }
  /// "model1.decoder.w" is "decoder.w" in model1.
  static std::vector<TorchStep> path_in_model(std::string_view name) {
    const size_t chunk = megatron_chunk_bytes(name);
    return {
        {TorchStep::Kind::kKey, std::string(chunk > 0 ? name.substr(0, chunk - 1) : "model"), 0},
        {TorchStep::Kind::kKey, std::string(name.substr(chunk)), 0}};
  }

  /// Whoever reads the file again knows an optimizer's state by the order of parameters: that of
  /// the model, whatever files they came from.
  void put_in_order() {
    std::vector<std::string_view> names;
    for (const NewArray& array : arrays_) names.push_back(array.name);
    order_ = megatron_order(names);
    std::vector<uint32_t> position(arrays_.size()), order(array_.size());
    for (uint32_t i = 0; i < order_.size(); ++i) position[order_[i]] = i;
    for (uint32_t v = 0; v < order.size(); ++v) order[v] = v;
    std::sort(order.begin(), order.end(),
              [&](uint32_t a, uint32_t b) { return position[array_[a]] < position[array_[b]]; });
    std::vector<TorchPathValue> values;
    std::vector<uint32_t> arrays;
    for (const uint32_t v : order) {
      values.push_back(std::move(values_[v]));
      arrays.push_back(array_[v]);
    }
    values_ = std::move(values);
    array_ = std::move(arrays);
  }

  /// The optimizer's state goes by number in the files of Megatron's, and its groups list these.
  Result<> place_state() {
    std::vector<MegatronArray> arrays;
    for (const uint32_t i : order_)
      arrays.push_back({arrays_[i].name, arrays_[i].dtype, *arrays_[i].shape});
    PTC_TRY(auto places, optimizer_->places(arrays));
    // Values are in that order, too.
    for (size_t v = 0; v < array_.size(); ++v)
      if (auto& path = places.paths[v]; !path.empty()) values_[v].path = std::move(path);
    for (auto& [path, numbers] : places.groups) {
      PickleWriter list;
      list.opcode(']');
      list.opcode('(');
      for (const int64_t number : numbers) list.integer(number);
      list.opcode('e');
      group_texts_.push_back(std::move(list).finish());
      PTC_TRY(auto pickle, Pickle::parse(group_texts_.back()));
      group_pickles_.push_back(std::move(pickle));
      values_.push_back({std::move(path), &group_pickles_.back(), group_pickles_.back().root()});
    }
    for (auto& path : places.empty_lists) {
      values_.push_back({std::move(path)});
      values_.back().empty_list = true;
    }
    return ok();
  }

  /// Whether it is beside the tensors, in the flat dict of Megatron's model.
  static bool is_beside_tensors(const std::vector<TorchStep>& path) {
    return path.size() == 2 && (path[0].key == "model" || megatron_chunk(path[0].key)) &&
           path[1].kind == TorchStep::Kind::kKey;
  }
  /// Where the number behind `word` is in a name: begin and end; 0: there is none.
  static std::pair<size_t, size_t> number_after(std::string_view word, std::string_view name) {
    const size_t at = name.find(word);
    if (at == name.npos || (at > 0 && name[at - 1] != '.')) return {0, 0};
    const size_t begin = at + word.size();
    const size_t end = std::min(name.find_first_not_of("0123456789", begin), name.size());
    return end > begin ? std::pair(begin, end) : std::pair<size_t, size_t>(0, 0);
  }
  static std::pair<size_t, size_t> layer_in(std::string_view name) {
    return number_after("layers.", name);
  }
  /// Within its layer.
  static std::pair<size_t, size_t> expert_in(std::string_view name) {
    const auto found = number_after("local_experts.", name);
    return found.first > layer_in(name).second ? found : std::pair<size_t, size_t>(0, 0);
  }
  /// The name with "#" for the numbers of its layer and expert.
  static std::string without_layer(std::string_view name) {
    std::string kind(name);
    for (const auto& [begin, end] : {expert_in(name), layer_in(name)})
      if (end > 0) kind.replace(begin, end - begin, "#");
    return kind;
  }
  static std::string module_of(std::string_view name) {
    return std::string(name.substr(0, name.rfind('.') + 1));
  }
  /// What modules have beside their tensors (`_extra_state`, most often None) is where the module
  /// is. That of layers is None.
  void place_of_modules() {
    // Layers, and layers' experts, by stretch of layers ("model1.").
    std::map<std::string, std::set<std::pair<std::string, std::string>>> layers, experts;
    for (const NewArray& array : arrays_) {
      const std::string chunk(array.name.substr(0, megatron_chunk_bytes(array.name)));
      const auto [begin, end] = layer_in(array.name);
      const std::string layer(array.name.substr(begin, end - begin));
      if (end > 0) layers[chunk].emplace(layer, "");
      if (const auto [from, to] = expert_in(array.name); end > 0 && to > 0)
        experts[chunk].emplace(layer, array.name.substr(from, to - from));
      for (size_t dot = array.name.find('.'); dot != array.name.npos;
           dot = array.name.find('.', dot + 1))
        modules_here_.emplace(array.name.substr(0, dot + 1));
    }
    for (const auto& [kind, value] : of_modules_)
      for (const std::string& chunk : chunks_) {
        if (chunk.empty() && has_chunks_) continue;  // of what is in no stretch of layers
        const std::string& key = value.path.back().key;
        const auto [layer_begin, layer_end] = layer_in(key);
        const auto [expert_begin, expert_end] = expert_in(key);
        if (layer_end == 0) {
          if (is_module_here(chunk, key)) place_beside(path_in_model(chunk + key), value);
          continue;
        }
        for (const auto& [layer, expert] : expert_end > 0 ? experts[chunk] : layers[chunk]) {
          std::string name = key;
          name.replace(expert_begin, expert_end - expert_begin, expert);
          name.replace(layer_begin, layer_end - layer_begin, layer);
          if (is_module_here(chunk, name)) place_beside(path_in_model(chunk + name), value);
        }
      }
    owner_.resize(values_.size());
  }
  void place_beside(const std::vector<TorchStep>& path, const OfModule& value) {
    if (occupied_.contains(torch_path_text(path))) return;
    values_.push_back({path, value.pickle, value.node});
    occupy(path, 1);
  }
  /// Whether the file has the module of a value beside its tensors.
  bool is_module_here(const std::string& chunk, std::string_view name) const {
    const std::string module = module_of(name);
    if (module.empty() || modules_here_.contains(chunk + module)) return true;
    if (module == "output_layer.")  // tied, without a weight
      return std::any_of(arrays_.begin(), arrays_.end(), [&](const NewArray& array) {
        return array.name.starts_with(chunk + "decoder.final_");
      });
    return !modules_with_tensors_.contains(module_of(without_layer(name)));
  }
  void place_parameters() {
    for (auto& [text, parameters] : parameters_) {
      std::vector<TorchStep> path = parameters.path;
      occupy(path, parameters.of);
      path.push_back({TorchStep::Kind::kListIndex, {}, 0});
      for (const Parameters::One& one : parameters.all) {
        if (!is_here(parameters.path, one.key)) continue;
        values_.push_back({path, one.pickle, one.node});
        ++path.back().number;
      }
      if (path.back().number == 0) {
        values_.push_back({parameters.path});
        values_.back().empty_list = true;
      }
    }
    owner_.resize(values_.size());
  }
  /// Whether the file has the optimizer's state of a parameter, or else that itself. What no file
  /// has tensors of stays.
  bool is_here(std::vector<TorchStep> path, const TorchStep& key) const {
    path.resize(path.size() - 3);  // param_groups, its number, params
    path.push_back({TorchStep::Kind::kKey, "state", 0});
    path.push_back(key);
    const std::string state = torch_path_text(path);
    if (occupied_.contains(state)) return true;
    if (elsewhere_.contains(state)) return false;
    if (key.kind != TorchStep::Kind::kKey) return true;
    for (std::string_view name = key.key;;) {
      if (by_name_.contains(name)) return true;
      if (names_elsewhere_.contains(std::string(name))) return false;
      const size_t dot = name.find('.');
      if (dot == name.npos) return true;
      name.remove_prefix(dot + 1);  // of a wrapper
    }
  }

  void occupy(std::vector<TorchStep> path, size_t of) {
    values_at_.insert(torch_path_text(path));
    for (; occupied_.try_emplace(torch_path_text(path), of).second && !path.empty();
         path.pop_back()) {
    }
  }
  /// Not where there is another value, or below one, or in a list that is another file's.
  void place(const Own& own) {
    std::vector<TorchStep> path = own.value.path;
    if (!own.value.key && occupied_.contains(torch_path_text(path))) return;
    for (std::vector<TorchStep> above = path; !above.empty();) {
      const bool element = above.back().kind == TorchStep::Kind::kListIndex ||
                           above.back().kind == TorchStep::Kind::kTupleIndex;
      above.pop_back();
      const std::string text = torch_path_text(above);
      const auto list = occupied_.find(text);
      if (values_at_.contains(text)) return;
      // 0: of the model's tensors
      if (element && list != occupied_.end() && list->second != 0 && list->second != own.of) return;
    }
    values_.push_back(own.value);
    owner_.push_back(&own);
    if (!own.value.key) occupy(std::move(path), own.of);
  }
  void place(std::vector<TorchStep> path, uint32_t array) {
    TorchPathValue value{std::move(path)};
    value.dtype = arrays_[array].dtype;
    value.shape = *arrays_[array].shape;
    values_.push_back(std::move(value));
    array_.push_back(array);
  }

  const std::span<const NewArray> arrays_;
  size_t left_;
  std::unordered_map<std::string_view, uint32_t> by_name_;
  std::unordered_map<std::string, std::vector<TorchStep>> kinds_;  // a path of each kind of name
  std::vector<bool> placed_;                                       // by array
  std::vector<WrittenTorchFileRef> files_;                         // whose pickles values point to
  std::unordered_set<std::string> elsewhere_;        // texts of paths of tensors that do not come,
                                                     // and of what is above them
  std::unordered_set<std::string> names_elsewhere_;  // of tensors
  std::map<std::string, Parameters> parameters_;     // by the text of the list's path
  std::unordered_set<std::string> pairs_;            // dict and key
  std::vector<TorchPathValue> values_;               // first those of arrays
  std::vector<uint32_t> array_;                      // by value
  std::vector<const Own*> owner_;                    // by value; null: of an array, or a parameter
  std::vector<Own> literals_, empties_;
  // Of Megatron's files:
  bool is_megatron_ = false;
  std::set<std::string> chunks_;  // "model0." and "model1."; "" without stretches of layers
  bool has_chunks_ = false;
  std::vector<uint32_t> order_;  // of arrays
  std::optional<MegatronOptimizer> optimizer_;
  std::deque<std::string> group_texts_;
  std::deque<Pickle> group_pickles_;                      // of those texts
  std::map<std::string, OfModule> of_modules_;            // by key without its layer
  std::unordered_set<std::string> modules_with_tensors_;  // "decoder.layers.#.mlp.router."
  std::unordered_set<std::string> modules_here_;          // "decoder.layers.0.mlp."
  /// By the text of a path with a value at it, or below: the file of the first, 0 for tensors.
  std::unordered_map<std::string, size_t> occupied_;
  std::unordered_set<std::string> values_at_;
};

}  // namespace

Result<FileLayout> merge_torch_files(std::span<const NewArray> arrays, WrittenTorchFileRef first,
                                     std::span<const FileOutline> others) {
  TorchMerge merge(arrays);
  PTC_TRY(merge.add(std::move(first)));
  for (const FileOutline& other : others) {
    if (merge.is_complete()) break;
    PTC_TRY(auto file, WrittenTorchFile::read(other));
    PTC_TRY(merge.add(std::move(file)));
  }
  return std::move(merge).lay_out();
}

}  // namespace ptc
