#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "reshard/ptc/model.h"
#include "tests/support/synthetic_model.h"

namespace ptc {
namespace {

using ptc::testing::synthetic_model;
using ptc::testing::written_ranks;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr std::string_view kQwen = R"({"model_type": "qwen2", "hidden_size": 16,
  "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
  "intermediate_size": 24, "vocab_size": 300, "tie_word_embeddings": true})";

class Infer : public ::testing::Test {
 protected:
  Infer() : model_(synthetic_model(kQwen)), spec_{.sizes = {.tp = 2, .pp = 2, .dp = 2}} {
    ranks_ = written_ranks(model_, spec_);
  }
  Result<Model::Inferred> infer() const {
    return Model::infer(model_.rules_ptr(), model_.facts(), spec_, ranks_);
  }
  std::string error() const {
    const auto inferred = infer();
    if (inferred) return "accepted";
    EXPECT_EQ(inferred.error().code(), Code::kInvalidArgument);
    return inferred.error().message();
  }
  WrittenTensor& written(size_t rank, std::string_view name) {
    auto& tensors = ranks_[rank].tensors;
    return *std::find_if(tensors.begin(), tensors.end(),
                         [&](const WrittenTensor& each) { return each.name == name; });
  }

  Model model_;
  LayoutSpec spec_;
  std::vector<WrittenRank> ranks_;
};

constexpr const char* kNorm = "model.layers.0.input_layernorm.weight";
constexpr const char* kQuery = "model.layers.0.self_attn.q_proj.weight";

TEST_F(Infer, FindsTheModel) {
  const auto inferred = infer();
  ASSERT_TRUE(inferred.has_value()) << inferred.error().message();
  EXPECT_EQ(inferred.value().model.tensors().size(), model_.tensors().size());
}

TEST_F(Infer, QuantisedWeights) {
  const std::string down = "model.layers.0.mlp.down_proj.", head = "lm_head.";
  const auto tensors = [&](uint64_t inputs, uint64_t groups) {
    const auto words = [&](const std::string& name, Shape shape) {
      return TensorInfo{"model.safetensors", name, DType::kI32, shape};
    };
    const auto halves = [&](const std::string& name, Shape shape) {
      return TensorInfo{"model.safetensors", name, DType::kF16, shape};
    };
    return std::vector<TensorInfo>{
        words(down + "qweight", {inputs, 8}),  words(down + "qzeros", {groups, 8}),
        halves(down + "scales", {groups, 64}), words(head + "qweight", {64, 125}),
        words(head + "qzeros", {2, 125}),      halves(head + "scales", {2, 1000})};
  };
  struct Case {
    std::string_view config;
    uint64_t inputs, groups;
  };
  constexpr std::string_view kOfGroups = R"({"num_attention_heads": 8, "vocab_size": 1000,
    "quantization_config": {"group_size": 32}})";
  constexpr std::string_view kOfAll = R"({"num_attention_heads": 8, "vocab_size": 1000,
    "quantization_config": {"group_size": -1}})";
  // A rank of two has one scale for each output, of one of two groups or of all inputs.
  for (const Case& each : {Case{kOfGroups, 128, 4}, Case{kOfGroups, 64, 2}, Case{kOfAll, 64, 1},
                           Case{kOfGroups, 32, 1}}) {
    SCOPED_TRACE(each.groups);
    const auto rules = RuleSet::builtin("llama").value();
    model_ =
        Model::bind(rules, rules->facts(each.config).value(), tensors(each.inputs, each.groups))
            .value();
    spec_ = {.sizes = {.tp = 2}};
    ranks_ = written_ranks(model_, spec_);
    EXPECT_EQ(written(0, down + "scales").shape,
              (Shape{std::max<uint64_t>(each.groups / 2, 1), 64}));
    EXPECT_EQ(written(1, head + "qzeros").shape, (Shape{2, 64}));  // of 512 padded rows
    const auto inferred = infer();
    ASSERT_TRUE(inferred.has_value()) << inferred.error().message();
    for (const TensorInfo& found : inferred.value().model.tensors()) {
      const auto as_it_was =
          std::find_if(model_.tensors().begin(), model_.tensors().end(),
                       [&](const TensorInfo& tensor) { return tensor.name == found.name; });
      EXPECT_EQ(found.shape, as_it_was->shape) << found.name;
    }
  }
}

TEST_F(Infer, AStageWithoutLayersHasNothingToWrite) {
  spec_ = {.sizes = {.pp = 6}};
  ranks_ = written_ranks(model_, spec_);
  ranks_.erase(ranks_.begin() + 4);  // the first four have a layer each
  EXPECT_EQ(error(), "accepted");
  ranks_.erase(ranks_.begin() + 3);
  EXPECT_THAT(error(), HasSubstr("rank 3 (tp rank 0, pp rank 3, ep rank 0) of layout tp1-pp6-dp1 "
                                 "wrote nothing"));
}

TEST_F(Infer, AReplicaMayBeMissingOrEmpty) {
  ranks_[3].tensors.clear();
  ranks_.erase(ranks_.begin() + 2);
  EXPECT_EQ(error(), "accepted");
}

TEST_F(Infer, AStateThatNobodyWroteIsNamed) {
  ranks_.erase(ranks_.begin() + 6);
  ranks_.erase(ranks_.begin() + 4);
  EXPECT_THAT(error(), HasSubstr("rank 4 (tp rank 0, pp rank 1, ep rank 0) of layout tp2-pp2-dp2 "
                                 "wrote nothing, nor did any replica"));
}

TEST_F(Infer, AStateWithoutTensorsIsNamed) {
  ranks_[6].tensors.clear();
  ranks_[4].tensors.clear();
  EXPECT_THAT(error(), AllOf(HasSubstr("rank 4"), HasSubstr("wrote no tensors"),
                             HasSubstr("it should hold")));
}

TEST_F(Infer, AMissingTensorIsNamed) {
  auto& tensors = ranks_[1].tensors;
  tensors.erase(tensors.begin() + (&written(1, kNorm) - tensors.data()));
  EXPECT_THAT(error(), AllOf(HasSubstr("rank 1"), HasSubstr(kNorm), HasSubstr("lacks"),
                             HasSubstr("model.safetensors")));
}

TEST_F(Infer, ATiedCopyIsRequiredOnTheLastStage) {
  for (size_t rank : {4, 5, 6, 7}) {
    auto& tensors = ranks_[rank].tensors;
    tensors.erase(tensors.begin() + (&written(rank, "model.embed_tokens.weight") - tensors.data()));
  }
  EXPECT_THAT(error(), AllOf(HasSubstr("rank 4"), HasSubstr("lacks model.embed_tokens.weight")));
}

TEST_F(Infer, ATensorOnTheWrongStageIsNamed) {
  ranks_[0].tensors.push_back({"model.safetensors", "model.norm.weight", DType::kF32, {16}});
  EXPECT_THAT(error(), AllOf(HasSubstr("rank 0, model.safetensors: model.norm.weight does not "
                                       "belong on tp rank 0, pp rank 0"),
                             HasSubstr("last stage")));
}

TEST_F(Infer, ATensorThatIsThereTwiceIsNamed) {
  ranks_[1].tensors.push_back(written(1, kNorm));
  EXPECT_THAT(error(), AllOf(HasSubstr("rank 1"), HasSubstr("is there twice")));
}

TEST_F(Infer, ShapesMustAgree) {
  written(1, kQuery).shape = {4, 16};
  EXPECT_THAT(error(), AllOf(HasSubstr("rank 1, model.safetensors: "), HasSubstr(kQuery),
                             HasSubstr("has shape [4, 16], but [8, 16] on rank 0")));
}

TEST_F(Infer, ShapesMustBeWholeHeads) {
  for (size_t rank = 0; rank < 4; ++rank) written(rank, kQuery).shape = {7, 16};
  EXPECT_THAT(error(), AllOf(HasSubstr(kQuery), HasSubstr("not divisible into 8 heads")));
}

TEST_F(Infer, AnUncutVocabularyIsRefused) {
  for (WrittenRank& rank : ranks_) {
    for (WrittenTensor& tensor : rank.tensors) {
      if (tensor.name == "model.embed_tokens.weight") tensor.shape = {300, 16};
    }
  }
  EXPECT_THAT(error(), AllOf(HasSubstr("model.embed_tokens.weight"), HasSubstr("600 rows")));
}

TEST_F(Infer, TypesMustAgree) {
  written(1, kQuery).dtype = DType::kBF16;
  EXPECT_THAT(error(), HasSubstr("is BF16, but F32 on rank 0"));
}

TEST_F(Infer, OtherPaddingIsFoundAndKept) {
  for (WrittenRank& rank : ranks_) {
    for (WrittenTensor& tensor : rank.tensors) {
      if (tensor.name == "model.embed_tokens.weight") tensor.shape = {150, 16};
    }
  }
  const auto inferred = infer();
  ASSERT_TRUE(inferred.has_value()) << inferred.error().message();
  const Model& found = inferred.value().model;
  const uint32_t embedding = inferred.value().tensor_of[0][0];
  EXPECT_EQ(found.tensors()[embedding].name, "model.embed_tokens.weight");
  EXPECT_EQ(found.tensors()[embedding].shape, (Shape{300, 16}));
  EXPECT_EQ(found.tensors()[embedding].vocab_multiple, 1u);
  EXPECT_EQ(found.slice(embedding, spec_, {}).value()->local_shape, (Shape{150, 16}));
}

TEST_F(Infer, StageLocalNames) {
  spec_.naming = Naming::kStage;
  spec_.stages = {1, 3};
  ranks_ = written_ranks(model_, spec_);
  EXPECT_EQ(error(), "accepted");
  spec_.stages = {2, 2};
  EXPECT_THAT(error(), HasSubstr("pipeline stage 0 wrote 1 layers, but layout"));
}

TEST_F(Infer, StageLocalNamesWithoutAConfig) {
  spec_ = {.sizes = {.pp = 2}, .naming = Naming::kStage};
  ranks_ = written_ranks(model_, spec_);
  RuleSet::Facts facts;
  facts.tied = true;
  const auto inferred = Model::infer(model_.rules_ptr(), facts, spec_, ranks_);
  ASSERT_TRUE(inferred.has_value()) << inferred.error().message();
  EXPECT_EQ(inferred.value().model.layers(), 4u);
}

/// Megatron's own files count layers by stage whatever the layout says, and call the tied embedding
/// the head where they have it for one.
TEST(InferByStage, NamesAreThoseOfTheWholeModel) {
  const LayoutSpec spec{.sizes = {.pp = 2}};
  const std::string embedding = "embedding.word_embeddings.weight";
  const std::string norm = "decoder.layers.0.input_layernorm.weight";
  const std::string head = "output_layer.weight";
  const auto rank = [&](uint64_t number, const std::vector<std::pair<std::string, Shape>>& names) {
    WrittenRank made{number, spec.coords(number), {}};
    for (const auto& [name, shape] : names) {
      made.tensors.push_back({"a.pt", name, DType::kF32, shape});
      made.tensors.push_back({"a.pt", "optimizer.state." + name + ".exp_avg", DType::kF32, shape});
    }
    for (WrittenTensor& tensor : made.tensors) tensor.by_stage = true;
    return made;
  };
  const std::vector<WrittenRank> ranks{rank(0, {{embedding, {256, 4}}, {norm, {4}}}),
                                       rank(1, {{norm, {4}}, {head, {256, 4}}})};
  RuleSet::Facts facts;
  facts.tied = true;
  const auto inferred = Model::infer(RuleSet::builtin("megatron").value(), facts, spec, ranks);
  ASSERT_TRUE(inferred.has_value()) << inferred.error().message();
  const Model& model = inferred.value().model;
  const auto& of = inferred.value().tensor_of;
  std::vector<std::string> names;
  for (const TensorInfo& tensor : model.tensors()) names.push_back(tensor.name);
  EXPECT_THAT(
      names,
      ElementsAre(embedding, "optimizer.state." + embedding + ".exp_avg", norm,
                  "optimizer.state." + norm + ".exp_avg", "decoder.layers.1.input_layernorm.weight",
                  "optimizer.state.decoder.layers.1.input_layernorm.weight.exp_avg"));
  EXPECT_EQ(of[1][2], of[0][0]);
  EXPECT_EQ(of[1][3], of[0][1]);
  EXPECT_EQ(model.local_name(of[1][0], spec, 1), norm);
  EXPECT_EQ(model.local_name(of[1][0], {}, 0), "decoder.layers.1.input_layernorm.weight");
  EXPECT_EQ(model.local_name(of[0][0], spec, 0), embedding);
  EXPECT_EQ(model.local_name(of[0][0], spec, 1), head);
  EXPECT_EQ(model.local_name(of[0][1], spec, 1), "optimizer.state." + head + ".exp_avg");
  EXPECT_EQ(model.local_name(of[0][1], {}, 0), "optimizer.state." + embedding + ".exp_avg");
}

/// Layers that predict further tokens count from 0 on their stage, which has the embedding, too.
TEST(InferByStage, LayersThatPredictFurtherTokens) {
  const LayoutSpec spec{.sizes = {.pp = 2}};
  const std::string embedding = "embedding.word_embeddings.weight", head = "output_layer.weight",
                    norm = "decoder.layers.0.input_layernorm.weight",
                    further = "mtp.layers.0.transformer_layer.input_layernorm.weight";
  const auto ranks = [&](const std::vector<std::string>& first,
                         const std::vector<std::string>& last) {
    std::vector<WrittenRank> made;
    for (const auto& names : {first, last}) {
      made.push_back({made.size(), spec.coords(made.size()), {}});
      for (const std::string& name : names) {
        const bool table = name == embedding || name == head;
        made.back().tensors.push_back(
            {"a.pt", name, DType::kF32, table ? Shape{256, 4} : Shape{4}});
        made.back().tensors.back().by_stage = true;
      }
    }
    return made;
  };
  const auto rules = RuleSet::builtin("megatron").value();
  RuleSet::Facts facts;
  facts.numbers = {{"layers", 2}, {"vocab", 256}};
  facts.tied = false;
  const auto inferred =
      Model::infer(rules, facts, spec, ranks({embedding, norm}, {embedding, norm, further, head}));
  ASSERT_TRUE(inferred.has_value()) << inferred.error().message();
  const Model& model = inferred.value().model;
  const auto& of = inferred.value().tensor_of;
  EXPECT_EQ(of[0][0], of[1][0]);
  EXPECT_EQ(model.tensors()[of[1][1]].name, "decoder.layers.1.input_layernorm.weight");
  EXPECT_EQ(model.tensors()[of[1][2]].name, further);
  EXPECT_EQ(model.local_name(of[1][0], spec, 1), embedding);
  EXPECT_EQ(model.local_name(of[1][2], spec, 1), further);
  EXPECT_FALSE(Model::infer(rules, facts, spec, ranks({embedding, norm}, {norm, further, head})));
  // The head would be a second name of it there.
  facts.tied = true;
  const auto tied = Model::infer(
      rules, facts, {},
      {ranks({embedding, norm, "decoder.layers.1.input_layernorm.weight", further}, {})[0]});
  ASSERT_TRUE(tied.has_value()) << tied.error().message();
  EXPECT_THAT(tied.value().model.check(spec).error().message(),
              ::testing::HasSubstr("embedding.word_embeddings.weight is on the last of several"));
}

/// The head may be on any stage that a layout names.
TEST(InferByStage, ATiedHeadIsWhereTheLayoutSaysIt) {
  LayoutSpec spec{.sizes = {.pp = 2}, .stages = {1, 1}};
  spec.embedding_at = 1;
  spec.head_at = 0;
  const auto rank = [&](uint64_t number, const std::string& name) {
    WrittenRank made{number, spec.coords(number), {}};
    made.tensors.push_back(
        {"a.pt", "decoder.layers.0.input_layernorm.weight", DType::kF32, Shape{4}});
    made.tensors.push_back({"a.pt", name, DType::kF32, Shape{256, 4}});
    for (WrittenTensor& tensor : made.tensors) tensor.by_stage = true;
    return made;
  };
  RuleSet::Facts facts;
  facts.tied = true;
  const auto inferred =
      Model::infer(RuleSet::builtin("megatron").value(), facts, spec,
                   {rank(0, "output_layer.weight"), rank(1, "embedding.word_embeddings.weight")});
  ASSERT_TRUE(inferred.has_value()) << inferred.error().message();
  const auto& of = inferred.value().tensor_of;
  EXPECT_EQ(of[0][1], of[1][1]);
}

/// With several stretches of layers on a stage, and experts that each rank counts from 0.
TEST(InferByStage, StretchesOfLayersAndExperts) {
  const LayoutSpec spec{.sizes = {.pp = 2, .ep = 2}, .vpp = 2};
  const auto named = [](int chunk, int expert, std::string_view state) {
    const std::string name =
        fmt::format("model{}.decoder.layers.0.mlp.experts.linear_fc2.weight{}", chunk, expert);
    return state.empty() ? name : fmt::format("optimizer.state.{}.{}", name, state);
  };
  const auto written = [&](const std::string& more) {
    std::vector<WrittenRank> ranks;
    for (uint64_t number = 0; number < 4; ++number) {
      WrittenRank made{number, spec.coords(number), {}};
      for (const int chunk : {0, 1})
        for (const int expert : {0, 1, 2})
          for (const std::string_view state : {"", "exp_avg"})
            made.tensors.push_back({"a.pt", named(chunk, expert, state), DType::kF32, {4, 2}});
      if (!more.empty()) made.tensors.push_back({"a.pt", more, DType::kF32, {4, 2}});
      for (WrittenTensor& tensor : made.tensors) tensor.by_stage = true;
      ranks.push_back(std::move(made));
    }
    return ranks;
  };
  const auto rules = RuleSet::builtin("megatron").value();
  const auto inferred = Model::infer(rules, {}, spec, written(""));
  ASSERT_TRUE(inferred.has_value()) << inferred.error().message();
  const Model& model = inferred.value().model;
  const auto& of = inferred.value().tensor_of;
  const auto name = [&](uint32_t rank, uint32_t tensor) {
    return model.tensors()[of[rank][tensor]].name;
  };
  // Ranks 0 and 1 are the expert ranks of the first stage.
  EXPECT_EQ(name(0, 0), "decoder.layers.0.mlp.experts.linear_fc2.weight0");
  EXPECT_EQ(name(1, 2), "decoder.layers.0.mlp.experts.linear_fc2.weight4");
  EXPECT_EQ(name(0, 6), "decoder.layers.2.mlp.experts.linear_fc2.weight0");
  EXPECT_EQ(name(3, 11), "optimizer.state.decoder.layers.3.mlp.experts.linear_fc2.weight5.exp_avg");
  for (uint32_t rank = 0; rank < 4; ++rank)
    for (uint32_t i = 0; i < of[rank].size(); ++i)
      EXPECT_EQ(model.local_name(of[rank][i], spec, rank / 2), written("")[rank].tensors[i].name);
  EXPECT_EQ(model.local_name(of[3][11], {.sizes = {.pp = 2, .ep = 3}}, 1),
            "optimizer.state.decoder.layers.1.mlp.experts.linear_fc2.weight1.exp_avg");
  const auto why = [&](const std::string& more, RuleSet::Facts facts) {
    const auto found = Model::infer(rules, std::move(facts), spec, written(more));
    return found.has_value() ? std::string("accepted") : std::string(found.error().message());
  };
  EXPECT_THAT(why(named(2, 0, ""), {}), HasSubstr("is in model2"));
  EXPECT_THAT(why(named(1, 0, "").substr(7), {}), HasSubstr("is in no stretch of layers"));
  EXPECT_THAT(why(named(0, 0, ""), {}), HasSubstr("is there twice"));
  RuleSet::Facts facts;
  facts.numbers = {{"experts", 4}};
  EXPECT_THAT(why("", facts), HasSubstr("is expert 2 of its rank"));
  facts.numbers = {{"experts", 7}};
  EXPECT_THAT(why("", facts), HasSubstr("not divisible by ep = 2"));
}

/// Which experts a rank has in an axis of others, their number tells.
TEST(InferFolded, PartsOfExpertRanks) {
  const LayoutSpec spec{.sizes = {.tp = 2, .ep = 2}};
  const std::string name = "decoder.layers.0.mlp.experts.weight1";
  std::vector<WrittenRank> ranks;
  for (uint64_t rank = 0; rank < 4; ++rank)
    ranks.push_back({rank,
                     spec.coords(rank),
                     {{"a.safetensors", name, DType::kF32, {4, 36}},
                      {"b.safetensors", "exp_avg." + name, DType::kF32, {4, 36}}}});
  const auto rules = RuleSet::builtin("megatron").value();
  RuleSet::Facts facts;
  facts.numbers = {{"experts", 6}, {"gated", 1}};
  const auto infer = [&] { return Model::infer(rules, facts, spec, ranks); };
  const auto inferred = infer();
  ASSERT_TRUE(inferred.has_value()) << inferred.error().message();
  for (const TensorInfo& info : inferred.value().model.tensors()) {
    EXPECT_EQ(info.shape, (Shape{6, 4, 24}));
    EXPECT_EQ(info.folded_into, 1u);
  }
  const auto why = [&] {
    const auto found = infer();
    return found.has_value() ? std::string("accepted") : std::string(found.error().message());
  };
  facts.numbers["experts"] = 5;
  EXPECT_THAT(why(), HasSubstr("the 5 experts are not divisible by ep = 2"));
  facts.numbers["experts"] = 10;
  EXPECT_THAT(why(), HasSubstr("axis 1 of [4, 36] does not hold 10 experts"));
  facts.numbers["experts"] = 6;
  ranks[1].tensors[0].in_boxes = true;
  EXPECT_THAT(why(), HasSubstr("have said which boxes"));
  facts.numbers.erase("experts");
  EXPECT_THAT(why(), HasSubstr("nobody says how many experts are in axis 1 of [4, 36]"));
}

TEST(InferNone, AnythingInOneState) {
  const LayoutSpec spec{.sizes = {.dp = 2, .cp = 2}};
  std::vector<WrittenRank> ranks;
  for (uint64_t rank = 0; rank < 4; ++rank) {
    ranks.push_back(
        {rank,
         spec.coords(rank),
         {{"a.safetensors", "x", DType::kU8, {0, 7}}, {"b.safetensors", "x", DType::kF64, {}}}});
  }
  const auto inferred = Model::infer(RuleSet::none(), {}, spec, ranks);
  ASSERT_TRUE(inferred.has_value()) << inferred.error().message();
  EXPECT_EQ(inferred.value().model.tensors().size(), 2u);
  EXPECT_EQ(inferred.value().model.tensors()[0].shape, (Shape{0, 7}));
  const auto cut = Model::infer(RuleSet::none(), {}, {.sizes = {.tp = 2, .dp = 2}}, ranks);
  EXPECT_FALSE(cut.has_value());
}

/// Four rows of three on two ranks, and a buffer on both, by what they say.
std::vector<WrittenRank> said_ranks(const LayoutSpec& spec) {
  std::vector<WrittenRank> ranks;
  for (uint64_t rank = 0; rank < 2; ++rank) {
    const SaidPart rows{{{2 * rank, 0}, {2, 3}}, {4, 3}};
    const SaidPart all{Box::whole({5}), {5}};
    ranks.push_back({rank,
                     spec.coords(rank),
                     {{"a.safetensors", "w", DType::kF32, {2, 3}, rows},
                      {"a.safetensors", "buffer", DType::kF32, {5}, all},
                      {"b.safetensors", "buffer", DType::kF32, {5}, all}}});
  }
  return ranks;
}

TEST(InferOver, RowsOfAllRanksThatShareThemAddUp) {
  const Model model = synthetic_model(R"({"model_type": "mixtral", "hidden_size": 12,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 8, "vocab_size": 256, "num_local_experts": 4})",
                                      true);
  for (const char* name : {"tp2-pp1-dp2-cp2-fsdp-over_cp", "tp2-pp1-dp3-ep2-fsdp-over_ep",
                           "tp2-pp2-dp3-ep2-zero1-over_ep", "tp1-pp1-dp1-ep4-fsdp-over_ep",
                           "tp1-pp1-dp2-ep2-cp2-fsdp-over_cp_ep-order_tp_ep_cp_dp_pp"}) {
    const LayoutSpec spec = LayoutSpec::from_name(name).value();
    auto ranks = written_ranks(model, spec);
    const auto inferred = Model::infer(model.rules_ptr(), model.facts(), spec, ranks);
    ASSERT_TRUE(inferred.has_value()) << name << ": " << inferred.error().message();
    for (const TensorInfo& found : inferred.value().model.tensors()) {
      const auto& all = model.tensors();
      const auto original = std::find_if(all.begin(), all.end(), [&](const TensorInfo& each) {
        return each.file == found.file && each.name == found.name;
      });
      ASSERT_NE(original, all.end()) << name;
      EXPECT_EQ(found.shape, original->shape) << name << " " << found.name;
    }
  }
  const LayoutSpec spec = LayoutSpec::from_name("tp1-pp1-dp2-cp2-zero1-over_cp").value();
  auto ranks = written_ranks(model, spec);
  ranks.erase(ranks.begin() + 3);
  const auto missing = Model::infer(model.rules_ptr(), model.facts(), spec, ranks);
  ASSERT_FALSE(missing.has_value());
  EXPECT_THAT(missing.error().message(), HasSubstr("rank 3 (tp rank 0, pp rank 0, ep rank 0, "
                                                   "dp·cp rank 3)"));
}

TEST(InferSaid, WhatTheLayoutSaysTooIsItsOwnAndBuffersStayWhole) {
  const LayoutSpec spec{.sizes = {.dp = 2}, .optimizer = OptimizerCut::kFsdp};
  const auto inferred = Model::infer(RuleSet::none(), {}, spec, said_ranks(spec));
  ASSERT_TRUE(inferred.has_value()) << inferred.error().message();
  const Model& model = inferred.value().model;
  // Nothing of the second file is cut: whether it may be is not known, and the layout says so.
  EXPECT_THAT(inferred.value().cut_otherwise, ::testing::ElementsAre("b.safetensors"));
  EXPECT_EQ(model.tensors()[0].shape, (Shape{4, 3}));
  EXPECT_TRUE(model.is_cut_over_dp(0, spec));
  EXPECT_TRUE(model.tensors()[1].whole_on_dp);
  EXPECT_FALSE(model.is_cut_over_dp(1, spec));
  EXPECT_EQ(model.tensors()[2].shape, Shape{5});
  EXPECT_TRUE(model.is_cut_over_dp(2, spec));
}

TEST(InferSaid, OtherPartsThanTheLayouts) {
  const LayoutSpec spec{.sizes = {.dp = 2}};
  auto ranks = said_ranks(spec);
  const auto inferred = Model::infer(RuleSet::none(), {}, spec, ranks);
  ASSERT_TRUE(inferred.has_value()) << inferred.error().message();
  EXPECT_THAT(inferred.value().cut_otherwise, ::testing::ElementsAre("a.safetensors"));
  ranks[1].tensors.erase(ranks[1].tensors.begin());  // the caller finds that half of it is missing
  EXPECT_TRUE(Model::infer(RuleSet::none(), {}, spec, ranks).has_value());
}

TEST(InferSaid, AllRanksSayTheSameOfTheWhole) {
  const LayoutSpec spec{.sizes = {.dp = 2}, .optimizer = OptimizerCut::kFsdp};
  auto ranks = said_ranks(spec);
  ranks[1].tensors[0].said->whole = {5, 3};
  auto inferred = Model::infer(RuleSet::none(), {}, spec, ranks);
  ASSERT_FALSE(inferred.has_value());
  EXPECT_THAT(inferred.error().message(),
              HasSubstr("a.safetensors: w says it is part of [5, 3], but of [4, 3] on rank 0"));
  ranks[1].tensors[0].said.reset();
  inferred = Model::infer(RuleSet::none(), {}, spec, ranks);
  ASSERT_FALSE(inferred.has_value());
  EXPECT_THAT(inferred.error().message(), HasSubstr("does not say which part of the whole it is"));
}

}  // namespace
}  // namespace ptc
