// Random models of every family under random layouts, against an oracle that goes element by
// element. PTC_SEED=<seed> replays one round; PTC_ROUNDS=<n> runs more.

#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <random>
#include <set>
#include <string>

#include "tests/reshard/slow_oracle.h"
#include "tests/support/synthetic_model.h"

namespace ptc::testing {
namespace {

constexpr const char* kFamilies[] = {"llama",   "qwen2",       "qwen3", "mixtral",  "qwen3_moe",
                                     "gpt2",    "gpt_neox",    "bert",  "megatron", "mistral",
                                     "deepseek_v3"};

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  uint64_t between(uint64_t low, uint64_t high) {
    return std::uniform_int_distribution<uint64_t>(low, high)(engine_);
  }
  bool coin() { return between(0, 1) == 1; }
  template <class T>
  T one_of(const std::vector<T>& values) {
    return values[between(0, values.size() - 1)];
  }

 private:
  std::mt19937_64 engine_;
};

struct Case {
  std::string config;
  std::string type;
  std::map<std::string, uint64_t> numbers;
  ParallelConfig widest;  // tp and ep that fit by construction
};

Case random_case(Random& random) {
  Case result;
  const std::string type = kFamilies[random.between(0, std::size(kFamilies) - 1)];
  auto& n = result.numbers;
  const uint64_t tp = random.one_of<uint64_t>({1, 2, 3, 4, 6});
  const bool grouped = type != "gpt2" && type != "gpt_neox" && type != "bert" &&
                       type != "deepseek_v3";
  // Key-value heads: a multiple of tp, or (where they may be shared) a divisor of it.
  uint64_t kv_heads = tp * random.between(1, 2);
  if (grouped && type != "megatron" && random.coin()) {
    do {
      kv_heads = random.between(1, tp);
    } while (tp % kv_heads != 0);
  }
  uint64_t heads = kv_heads;
  if (grouped) heads *= random.between(1, 3);
  while (heads % tp != 0) heads += kv_heads;
  if (!grouped) kv_heads = heads;
  n["heads"] = heads;
  n["kv_heads"] = kv_heads;
  n["head_dim"] = random.between(1, 3);
  n["hidden"] = grouped && random.coin() ? random.between(1, 9) : heads * n["head_dim"];
  n["intermediate"] = tp * random.between(1, 4);
  n["moe_intermediate"] = tp * random.between(1, 3);
  n["vocab"] = random.one_of<uint64_t>({random.between(2, 700), 128 * tp, 256, 384});
  n["layers"] = random.between(1, 5);
  const bool experts = type == "mixtral" || type == "qwen3_moe" || type == "deepseek_v3";
  const uint64_t ep = experts ? random.between(1, 3) : 1;
  n["experts"] = experts ? ep * random.between(1, 2) : 0;
  n["nope"] = random.between(1, 3);
  n["rope"] = random.between(1, 2);
  n["value"] = random.between(1, 3);
  n["tied"] = random.coin();
  n["head"] = random.coin();
  n["gated"] = random.coin();
  if (type == "megatron") n["tied"] = 0;
  const bool gpt2 = type == "gpt2";
  std::string& config = result.config;
  config = fmt::format(R"({{"model_type": "{}", "vocab_size": {}, "tie_word_embeddings": {})", type,
                       n["vocab"], n["tied"] != 0);
  auto put = [&](const char* key, const std::string& value) {
    config += fmt::format(R"(, "{}": {})", key, value);
  };
  auto put_number = [&](const char* key, uint64_t value) { put(key, std::to_string(value)); };
  put_number(gpt2 ? "n_embd" : "hidden_size", n["hidden"]);
  put_number(gpt2 ? "n_layer" : "num_hidden_layers", n["layers"]);
  put_number(gpt2 ? "n_head" : "num_attention_heads", heads);
  put_number(gpt2 ? "n_inner" : "intermediate_size", n["intermediate"]);
  if (grouped) {
    put_number(type == "megatron" ? "num_query_groups" : "num_key_value_heads", kv_heads);
    put_number("head_dim", n["head_dim"]);
  }
  if (type == "megatron") put("swiglu", n["gated"] != 0 ? "true" : "false");
  if (type == "deepseek_v3") {
    put_number("q_lora_rank", random.between(1, 5));
    put_number("kv_lora_rank", random.between(1, 5));
    put_number("qk_nope_head_dim", n["nope"]);
    put_number("qk_rope_head_dim", n["rope"]);
    put_number("v_head_dim", n["value"]);
    put_number("n_shared_experts", random.between(0, 1));
    put_number("first_k_dense_replace", random.between(0, n["layers"]));
    put_number("num_nextn_predict_layers", random.between(0, 1));
    put_number("n_routed_experts", n["experts"]);
  } else if (experts) {
    put_number(type == "mixtral" ? "num_local_experts" : "num_experts", n["experts"]);
  }
  if (experts) put_number("moe_intermediate_size", n["moe_intermediate"]);
  if (experts && random.coin()) put("stacked_experts", "true");
  if (type == "bert") put("prefix", n["head"] != 0 ? "true" : "false");
  if (type != "bert" && random.coin()) put("prefix", "false");
  config += "}";
  result.type = type;
  result.widest = {.tp = static_cast<uint32_t>(tp), .ep = static_cast<uint32_t>(ep)};
  return result;
}

/// A layout that the model can be cut by; tp and ep divide the widest, so that most divide.
LayoutSpec random_layout(Random& random, const Case& the_case, const Model& model) {
  for (;;) {
    LayoutSpec spec;
    do {
      spec.sizes.tp = static_cast<uint32_t>(random.between(1, the_case.widest.tp));
    } while (the_case.widest.tp % spec.sizes.tp != 0);
    do {
      spec.sizes.ep = static_cast<uint32_t>(random.between(1, the_case.widest.ep));
    } while (the_case.widest.ep % spec.sizes.ep != 0);
    spec.sizes.pp = static_cast<uint32_t>(random.between(1, 4));
    spec.sizes.dp = static_cast<uint32_t>(random.between(1, 2));
    spec.sizes.cp = static_cast<uint32_t>(random.between(1, 2));
    spec.order = RankOrder::parse(random.coin() ? "tp-cp-ep-dp-pp" : "pp-dp-tp-ep-cp").value();
    const auto layers = static_cast<uint32_t>(the_case.numbers.at("layers"));
    if (spec.sizes.pp <= layers && random.coin()) {
      spec.stages.assign(spec.sizes.pp, 1);
      for (uint32_t rest = layers - spec.sizes.pp; rest > 0; --rest) {
        ++spec.stages[random.between(0, spec.sizes.pp - 1)];
      }
    }
    if (spec.sizes.pp <= layers && random.coin()) spec.naming = Naming::kStage;
    if (model.check(spec)) return spec;
    if (spec.sizes.tp == the_case.widest.tp) {
      ADD_FAILURE() << "refused: " << model.check(spec).error().message();
      return {};
    }
  }
}

std::vector<uint64_t> flat(const std::vector<SlowOracle::AxisIndices>& axes, const Shape& global) {
  std::vector<uint64_t> all = {0};
  for (size_t axis = 0; axis < axes.size(); ++axis) {
    std::vector<uint64_t> next;
    for (uint64_t base : all) {
      for (const auto& index : axes[axis]) {
        next.push_back(index && base != UINT64_MAX ? base * global[axis] + *index : UINT64_MAX);
      }
    }
    all = std::move(next);
  }
  return all;
}

/// The local array with the global number of every element; UINT64_MAX where no piece is.
std::vector<uint64_t> paint(const SubTensor& part, const Shape& global) {
  std::vector<uint64_t> local(num_elements(part.local_shape).value(), UINT64_MAX);
  for (const Piece& piece : part.pieces) {
    const uint64_t volume = piece.global.volume();
    for (uint64_t i = 0; i < volume; ++i) {
      uint64_t rest = i;
      uint64_t global_index = 0, local_index = 0, global_step = 1, local_step = 1;
      for (size_t axis = global.size(); axis-- > 0;) {
        const uint64_t at = rest % piece.global.extent[axis];
        rest /= piece.global.extent[axis];
        global_index += (piece.global.offset[axis] + at) * global_step;
        local_index += (piece.local_offset[axis] + at) * local_step;
        global_step *= global[axis];
        local_step *= part.local_shape[axis];
      }
      EXPECT_LT(local_index, local.size());
      if (local_index >= local.size()) return local;
      EXPECT_EQ(local[local_index], UINT64_MAX) << "pieces overlap";
      local[local_index] = global_index;
    }
  }
  return local;
}

void expect_as_oracle(const Model& model, const LayoutSpec& spec, const SlowOracle& oracle) {
  const ParallelConfig& sizes = spec.sizes;
  std::vector<std::vector<bool>> covered;
  for (const TensorInfo& info : model.tensors()) {
    covered.emplace_back(num_elements(info.shape).value());
  }
  for (uint32_t index = 0; index < state_count(sizes); ++index) {
    const StateCoords state = state_at(sizes, index);
    ASSERT_EQ(state_index(sizes, state), index);
    for (uint32_t tensor = 0; tensor < model.tensors().size(); ++tensor) {
      const TensorInfo& info = model.tensors()[tensor];
      SCOPED_TRACE(fmt::format("{} tp {} pp {} ep {}", info.name, state.tp, state.pp, state.ep));
      std::string parameter = info.name;
      bool scalar = false;
      for (const char* prefix : {"exp_avg.", "exp_avg_sq.", "state."}) {
        if (!parameter.starts_with(prefix)) continue;
        parameter.erase(0, std::string_view(prefix).size());
        scalar = parameter.ends_with(".step");
        if (scalar) parameter.erase(parameter.size() - 5);
        break;
      }
      Shape oracle_shape = info.shape;
      if (scalar) {
        for (const TensorInfo& each : model.tensors()) {
          if (each.name == parameter) oracle_shape = each.shape;
        }
      }
      const auto expected = oracle.held(parameter, oracle_shape, spec, state);
      const auto part = model.slice(tensor, spec, state);
      ASSERT_TRUE(part.has_value()) << part.error().message();
      ASSERT_EQ(part.value().has_value(), expected.has_value());
      if (!expected) continue;
      if (scalar) {
        EXPECT_EQ(*part.value(), SubTensor::whole(info.shape));
        covered[tensor][0] = true;
        continue;
      }
      for (size_t axis = 0; axis < info.shape.size(); ++axis) {
        ASSERT_EQ(part.value()->local_shape[axis], (*expected)[axis].size()) << "axis " << axis;
      }
      const std::vector<uint64_t> painted = paint(*part.value(), info.shape);
      ASSERT_EQ(painted, flat(*expected, info.shape));
      for (uint64_t element : painted) {
        if (element != UINT64_MAX) covered[tensor][element] = true;
      }
    }
  }
  for (size_t tensor = 0; tensor < covered.size(); ++tensor) {
    for (bool element : covered[tensor]) {
      ASSERT_TRUE(element) << model.tensors()[tensor].name << " is not covered";
    }
  }
}

void expect_infer_inverts(const Model& model, const LayoutSpec& spec) {
  const std::vector<WrittenRank> ranks = written_ranks(model, spec);
  const auto inferred = Model::infer(model.rules_ptr(), model.facts(), spec, ranks);
  ASSERT_TRUE(inferred.has_value()) << inferred.error().message();
  const Model& found = inferred.value().model;
  std::map<std::pair<std::string, std::string>, const TensorInfo*> originals;
  for (const TensorInfo& info : model.tensors()) originals[{info.file, info.name}] = &info;
  ASSERT_EQ(found.tensors().size(), originals.size());
  for (const TensorInfo& info : found.tensors()) {
    const auto original = originals.find({info.file, info.name});
    ASSERT_NE(original, originals.end()) << info.name;
    EXPECT_EQ(info.shape, original->second->shape) << info.name;
    EXPECT_EQ(info.dtype, original->second->dtype) << info.name;
  }
  EXPECT_EQ(found.layers(), model.layers());
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    for (size_t i = 0; i < ranks[rank].tensors.size(); ++i) {
      const uint32_t tensor = inferred.value().tensor_of[rank][i];
      ASSERT_EQ(found.local_name(tensor, spec, ranks[rank].coords.pp), ranks[rank].tensors[i].name);
      const auto part = found.slice(tensor, spec, state_of(ranks[rank].coords));
      ASSERT_TRUE(part.has_value() && part.value().has_value());
      ASSERT_EQ(part.value()->local_shape, ranks[rank].tensors[i].shape);
    }
  }
}

void run_round(uint64_t seed) {
  SCOPED_TRACE(fmt::format("replay with PTC_SEED={}", seed));
  Random random(seed);
  const Case the_case = random_case(random);
  SCOPED_TRACE(the_case.config);
  const Model model = synthetic_model(the_case.config, random.coin());
  const SlowOracle oracle(the_case.type, the_case.numbers);
  for (int i = 0; i < 2 && !::testing::Test::HasFailure(); ++i) {
    const LayoutSpec spec = random_layout(random, the_case, model);
    SCOPED_TRACE(fmt::format("{} stages [{}]", spec.name(), fmt::join(spec.stages, ", ")));
    expect_as_oracle(model, spec, oracle);
    expect_infer_inverts(model, spec);
  }
}

TEST(ModelProperty, EveryRankHoldsWhatTheOracleSays) {
  if (const char* seed = std::getenv("PTC_SEED")) {
    run_round(std::strtoull(seed, nullptr, 10));
    return;
  }
  const char* rounds_text = std::getenv("PTC_ROUNDS");
  const uint64_t rounds = rounds_text ? std::strtoull(rounds_text, nullptr, 10) : 150;
  const uint64_t first = std::random_device()();
  std::cout << "seeds " << first << " to " << first + rounds - 1 << std::endl;
  for (uint64_t seed = first; seed < first + rounds && !HasFailure(); ++seed) run_round(seed);
}

}  // namespace
}  // namespace ptc::testing
