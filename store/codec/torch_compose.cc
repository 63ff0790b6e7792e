#include "store/codec/torch_compose.h"

#include <algorithm>
#include <array>
#include <map>
#include <unordered_map>

#include "store/base/json.h"
#include "store/codec/pickle_writer.h"
#include "store/codec/safetensors.h"

namespace ptc {
namespace {

constexpr uint32_t kNoValue = UINT32_MAX;

class TorchComposer {
 public:
  TorchComposer(std::span<const TorchPathValue> values, std::string_view root)
      : values_(values), root_(root) {}

  Result<TorchLayout> run() {
    layout_.tensors.resize(values_.size());
    nodes_.emplace_back();
    nodes_[0].is_dict = true;
    for (uint32_t i = 0; i < values_.size(); ++i) {
      PTC_TRY(add(i));
    }
    PTC_TRY(find_storages());
    PTC_TRY(write(0, 0));
    ZipWriter zip;
    zip.add(root_ + "/data.pkl", std::move(writer_).finish());
    zip.add(root_ + "/byteorder", "little");  // as lay_out_torch_file() has it
    for (size_t i = 0; i < storages_.size(); ++i) {
      const Storage& storage = storages_[i];
      layout_.tensors[storage.value] = {
          zip.add_later(root_ + "/data/" + std::to_string(i), storage.bytes, 0), storage.bytes};
    }
    for (uint32_t i = 0; i < values_.size(); ++i)
      if (values_[i].is_tensor()) layout_.tensors[i] = layout_.tensors[owner_[i]];
    zip.add(root_ + "/version", "3\n");
    layout_.zip = std::move(zip).finish();
    return std::move(layout_);
  }

 private:
  using Kind = TorchStep::Kind;
  struct Node {
    uint32_t value = kNoValue;
    bool is_dict = false, is_tuple = false;
    std::vector<std::pair<TorchStep, uint32_t>> children;  // in the order of their first value
    std::map<std::pair<std::string, int64_t>, uint32_t> by_key;
    std::vector<uint32_t> pairs;  // values with keys of their own
    bool empty() const { return children.empty() && pairs.empty(); }
  };
  struct Storage {
    uint64_t bytes;
    uint32_t value;
  };

  static bool is_key(const TorchStep& step) {
    return step.kind == Kind::kKey || step.kind == Kind::kNumberKey || step.kind == Kind::kTypesKey;
  }

  Result<> add(uint32_t number) {
    const std::vector<TorchStep>& path = values_[number].path;
    const auto clash = [&] {
      return invalid_argument("{}: there are two values in one place",
                              ptc::quoted(torch_name(path)));
    };
    const bool is_pair = values_[number].key.has_value();
    if (path.empty() && !is_pair && values_.size() == 1) return nodes_[0].value = number, ok();
    if ((path.empty() && !is_pair) || path.size() > TorchFile::kMaxDepth) return clash();
    uint32_t at = 0;
    for (size_t i = 0; i < path.size(); ++i) {
      const TorchStep& step = path[i];
      Node& node = nodes_[at];
      if (node.value != kNoValue) return clash();
      if (node.empty()) {
        node.is_dict = is_key(step);
        node.is_tuple = step.kind == Kind::kTupleIndex;
      } else if (node.is_dict != is_key(step) ||
                 node.is_tuple != (step.kind == Kind::kTupleIndex)) {
        return clash();
      }
      // A number that is a key is another key than its digits.
      std::pair<std::string, int64_t> key(step.kind == Kind::kKey        ? "k" + step.key
                                          : step.kind == Kind::kTypesKey ? "t" + step.key
                                                                         : "n",
                                          step.number);
      const auto [child, is_new] =
          node.by_key.try_emplace(std::move(key), static_cast<uint32_t>(nodes_.size()));
      const uint32_t next = child->second;
      if (is_new) {
        node.children.emplace_back(step, next);
        nodes_.emplace_back();  // `node` is no more
      } else if (i + 1 == path.size() && !is_pair) {
        return clash();
      }
      at = next;
    }
    Node& last = nodes_[at];
    if (!is_pair) {
      last.value = number;
      return ok();
    }
    if (last.value != kNoValue || (!last.empty() && !last.is_dict)) return clash();
    last.is_dict = true;
    last.pairs.push_back(number);
    return ok();
  }

  Result<> find_storages() {
    owner_.resize(values_.size());
    storage_.resize(values_.size());
    uint64_t sum = 0;
    for (uint32_t i = 0; i < values_.size(); ++i) {
      const TorchPathValue& value = values_[i];
      if (!value.is_tensor()) continue;
      const auto error = [&](std::string_view what) {
        return invalid_argument("tensor {}: {}", ptc::quoted(torch_name(value.path)), what);
      };
      owner_[i] = i;
      if (value.same_as != TorchTensor::kNone) {
        const uint32_t same = value.same_as;
        if (same >= i || !values_[same].is_tensor() || values_[same].dtype != value.dtype ||
            values_[same].shape != value.shape)
          return error("the tensor that it shares bytes with is not before it, or not like it");
        owner_[i] = owner_[same];
        storage_[i] = storage_[same];
        continue;
      }
      auto bytes = array_bytes(value.shape, value.dtype);
      if (!bytes) return error(bytes.error().message());
      if (torch_dtype_name(value.dtype).empty())
        return error(fmt::format("torch has no type {}", dtype_name(value.dtype)));
      if (__builtin_add_overflow(sum, bytes.value(), &sum) || sum >= uint64_t{1} << 62)
        return error("the tensors have more than 2^62 bytes");
      storage_[i] = static_cast<uint32_t>(storages_.size());
      storages_.push_back({bytes.value(), i});
    }
    return ok();
  }

  Result<> write(uint32_t at, size_t depth) {
    Node& node = nodes_[at];
    if (node.value != kNoValue) return write_value(node.value);
    if (!node.is_dict) {
      std::sort(node.children.begin(), node.children.end(),
                [](const auto& a, const auto& b) { return a.first.number < b.first.number; });
      for (size_t i = 0; i < node.children.size(); ++i)
        if (node.children[i].first.number != static_cast<int64_t>(i))
          return invalid_argument("of a list in it, element {} is missing", i);
    }
    if (node.is_dict || !node.is_tuple) writer_.opcode(node.is_dict ? '}' : ']');
    if (!node.empty() || node.is_tuple) writer_.opcode('(');
    for (const auto& [step, child] : node.children) {
      if (step.kind == Kind::kKey) writer_.text(step.key);
      else if (step.kind == Kind::kNumberKey) writer_.integer(step.number);
      else if (step.kind == Kind::kTypesKey) {
        PTC_TRY(write_types(step.key));
      }
      PTC_TRY(write(child, depth + 1));
    }
    for (const uint32_t pair : node.pairs) {
      PTC_TRY(pickled(pair, *values_[pair].key));
      PTC_TRY(pickled(pair, values_[pair].node));
    }
    if (node.is_tuple) writer_.opcode('t');
    else if (!node.empty()) writer_.opcode(node.is_dict ? 'u' : 'e');
    return ok();
  }

  /// "torch.bfloat16,torch.float32" as a tuple.
  Result<> write_types(std::string_view types) {
    writer_.opcode('(');
    while (!types.empty()) {
      const std::string_view type = types.substr(0, types.find(','));
      types.remove_prefix(std::min(type.size() + 1, types.size()));
      const size_t dot = type.find('.');
      if (dot == type.npos) return invalid_argument("{} is no type of torch's", ptc::quoted(type));
      PTC_TRY(writer_.global(type.substr(0, dot), type.substr(dot + 1)));
    }
    writer_.opcode('t');
    return ok();
  }

  Result<> pickled(uint32_t number, PickleId node) {
    const Pickle* pickle = values_[number].pickle;
    return pickles_.try_emplace(pickle, *pickle, writer_).first->second.write(node);
  }

  Result<> write_value(uint32_t number) {
    const TorchPathValue& value = values_[number];
    if (value.pickle != nullptr) return pickled(number, value.node);
    if (value.empty_list) return writer_.opcode(']'), ok();
    const std::string_view typed = torch_storage_name(value.dtype);
    const uint64_t bytes = storages_[storage_[number]].bytes;
    writer_.known_global("torch._utils",
                         typed.empty() ? "_rebuild_tensor_v3" : "_rebuild_tensor_v2");
    writer_.opcode('(');
    writer_.opcode('(');
    writer_.text("storage");
    if (typed.empty()) {
      writer_.known_global("torch.storage", "UntypedStorage");
    } else {
      PTC_TRY(writer_.global("torch", typed));
    }
    writer_.text(std::to_string(storage_[number]));
    writer_.text("cpu");
    writer_.integer(
        static_cast<int64_t>(typed.empty() ? bytes : bytes / (dtype_bits(value.dtype) / 8)));
    writer_.opcode('t');
    writer_.opcode('Q');
    writer_.integer(0);
    const Shape& shape = value.shape;
    std::array<uint64_t, kMaxAxes> strides{};
    uint64_t stride = 1;
    for (size_t axis = shape.size(); axis-- > 0; stride *= std::max<uint64_t>(shape[axis], 1))
      strides[axis] = stride;
    writer_.numbers(shape.begin(), shape.end());
    writer_.numbers(strides.data(), strides.data() + shape.size());
    writer_.boolean(false);
    writer_.known_global("collections", "OrderedDict");
    writer_.opcode(')');
    writer_.opcode('R');
    if (typed.empty()) {
      PTC_TRY(writer_.global("torch", torch_dtype_name(value.dtype)));
    }
    writer_.opcode('t');
    writer_.opcode('R');
    return ok();
  }

  const std::span<const TorchPathValue> values_;
  const std::string root_;
  TorchLayout layout_;
  PickleWriter writer_;
  std::vector<Node> nodes_;
  std::vector<uint32_t> owner_, storage_;  // by value
  std::vector<Storage> storages_;
  std::unordered_map<const Pickle*, PickleValues> pickles_;
};

}  // namespace

Result<TorchLayout> compose_torch_file(std::span<const TorchPathValue> values,
                                       std::string_view root) {
  return TorchComposer(values, root).run();
}

}  // namespace ptc
