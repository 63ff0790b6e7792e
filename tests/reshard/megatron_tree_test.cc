// Trees of Megatron's own format: what lies where in them, what their files say of the model, and
// whose the state is that their optimizers have by number.
#include "reshard/intake/megatron_tree.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <numeric>
#include <random>

#include "reshard/checkpoint/file_format.h"
#include "reshard/checkpoint/megatron_buckets.h"
#include "reshard/checkpoint/megatron_file.h"
#include "reshard/checkpoint/megatron_names.h"
#include "reshard/intake/tree_format.h"
#include "store/codec/torch_compose.h"
#include "store/codec/torch_file.h"

namespace ptc {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Path = std::vector<TorchStep>;
TorchStep key(std::string text) { return {TorchStep::Kind::kKey, std::move(text), 0}; }
TorchStep number(int64_t of) { return {TorchStep::Kind::kNumberKey, {}, of}; }
TorchStep element(int64_t of) { return {TorchStep::Kind::kListIndex, {}, of}; }

std::string place_text(std::string_view path) {
  const auto place = megatron_place(path);
  if (!place) return "none";
  return fmt::format("{}|{}|{}", place->directory, place->path, fmt::join(place->numbers, ","));
}

TEST(MegatronTree, PlacesOfFiles) {
  EXPECT_EQ(place_text("iter_0000100/mp_rank_01_002/model_optim_rng.pt"),
            "iter_0000100/mp_rank_01_002|model_optim_rng.pt|1,2");
  EXPECT_EQ(place_text("mp_rank_00/a/b"), "mp_rank_00|a/b|0");
  EXPECT_EQ(place_text("release/mp_rank_123_4567_000/a"),
            "release/mp_rank_123_4567_000|a|123,4567,0");
  for (const char* path :
       {"iter_0000100/model_optim_rng.pt", "mp_rank_1/a", "mp_rank_01_02/a",
        "mp_rank_01_002_003_004/a", "mp_rank_01_/a", "mp_rank_/a", "mp_rank_001/a", "mp_rank_01",
        "iter_/mp_rank_01/a", "other/mp_rank_01/a", "mp_rank_99999999999/a", "mp_rank_-1/a", ""})
    EXPECT_EQ(place_text(path), "none") << path;
  EXPECT_TRUE(is_megatron_iteration("iter_0000001"));
  EXPECT_TRUE(is_megatron_iteration("release"));
  EXPECT_FALSE(is_megatron_iteration("iter_0000001a"));
}

TEST(MegatronTree, NamesOfARanksDirectory) {
  for (const ParallelConfig& sizes :
       {ParallelConfig{}, ParallelConfig{.tp = 3, .dp = 2}, ParallelConfig{.tp = 2, .pp = 3},
        ParallelConfig{.tp = 2, .ep = 4}, ParallelConfig{.tp = 2, .pp = 2, .ep = 2, .cp = 2}})
    for (uint32_t i = 0; i < sizes.tp * sizes.pp * sizes.ep; ++i) {
      const RankCoords at{
          .tp = i % sizes.tp, .pp = i / sizes.tp % sizes.pp, .ep = i / sizes.tp / sizes.pp};
      const std::string name = megatron_rank_name(sizes, at);
      const auto coords = megatron_coords(sizes, megatron_rank_numbers(name));
      ASSERT_TRUE(coords) << name;
      EXPECT_EQ(std::tuple(coords->tp, coords->pp, coords->ep), std::tuple(at.tp, at.pp, at.ep));
      EXPECT_EQ(std::count(name.begin(), name.end(), '_'),
                2 + (sizes.pp > 1 ? 1 : 0) + (sizes.ep > 1 ? 1 : 0));
    }
  EXPECT_EQ(megatron_rank_name({.tp = 200, .pp = 2}, {.tp = 100, .pp = 1}), "mp_rank_100_001");
  EXPECT_TRUE(megatron_coords({.tp = 2}, {1, 0}));  // as some versions have it
  EXPECT_FALSE(megatron_coords({.tp = 2}, {1, 1}));
  EXPECT_EQ(megatron_iteration_name(100), "iter_0000100");
  EXPECT_EQ(megatron_iteration_name(123456789), "iter_123456789");
  EXPECT_EQ(megatron_iteration_name({}), "release");
  EXPECT_EQ(megatron_tracker_text(0), "0");
  EXPECT_EQ(megatron_tracker_text({}), "release");
}

/// As _ParamAndGradBuffer of Megatron-Core makes buffers: with padding, which is taken out at last.
std::vector<uint64_t> padded_buffer(const std::vector<MegatronParameter>& parameters,
                                    const std::vector<bool>& alone, std::optional<uint64_t> size,
                                    uint64_t ranks, uint64_t* elements) {
  const auto pad = [](uint64_t number, uint64_t to) { return (number + to - 1) / to * to; };
  std::vector<uint64_t> places(parameters.size());
  std::vector<std::pair<uint64_t, uint64_t>> buckets;
  uint64_t start = 0, begin = 0;
  bool any = false;
  const auto end_bucket = [&](uint64_t end) {
    buckets.emplace_back(begin, end);
    any = false;
    return begin = pad(end, std::lcm(ranks, uint64_t{128}));
  };
  for (size_t i = parameters.size(); i-- > 0;) {
    start = pad(start, 64);
    if (alone[i] && any) start = end_bucket(start);
    places[i] = start;
    any = true;
    start += num_elements(parameters[i].shape).value();
    if (alone[i] || (size && start - begin >= *size)) start = end_bucket(start);
  }
  if (any) end_bucket(start);
  std::vector<uint64_t> offsets;
  for (const uint64_t place : places) {
    uint64_t before = 0;
    for (const auto& [first, last] : buckets) {
      if (place >= first && place < std::max(last, first + 1)) {
        offsets.push_back(before + place - first);
        break;
      }
      before += last - first;
    }
  }
  *elements = 0;
  for (const auto& [first, last] : buckets) *elements += last - first;
  return offsets;
}

TEST(MegatronBuckets, ParametersLieAsInTheBuffersOfGradients) {
  const auto seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  for (int round = 0; round < 500; ++round) {
    MegatronDdp ddp;
    ddp.stages = 1 + random() % 2;
    ddp.tied = random() % 2 == 0;
    ddp.overlaps = random() % 4 > 0;
    ddp.data_parallel = 1 + random() % 60;
    if (random() % 2 == 0) ddp.bucket_elements = 1 + random() % 5000;
    else if (random() % 2 == 0) ddp.buckets = 1 + random() % 5;
    const uint64_t scale = ddp.bucket_elements || ddp.buckets ? 1 : 20'000;
    const bool first = random() % 2 == 0;
    std::vector<MegatronParameter> parameters;
    std::vector<bool> alone;
    uint64_t all = 0;
    const auto add = [&](std::string name, uint64_t rows) {
      alone.push_back(ddp.tied && ddp.stages > 1 && !name.starts_with("decoder"));
      parameters.push_back({std::move(name), DType::kBF16, Shape{rows, scale}});
      all += rows * scale;
    };
    if (first || ddp.stages == 1) add("embedding.word_embeddings.weight", 1 + random() % 2000);
    for (uint64_t layer = 0; layer < random() % 20; ++layer)
      add(fmt::format("decoder.layers.{}.w", layer), 1 + random() % 700);
    if (!first || ddp.stages == 1) add("output_layer.weight", 1 + random() % 2000);
    std::optional<uint64_t> size;
    if (ddp.overlaps && (first || ddp.stages == 1))
      size = ddp.bucket_elements ? *ddp.bucket_elements
             : ddp.buckets       ? all / *ddp.buckets
                                 : std::max<uint64_t>(40'000'000, 1'000'000 * ddp.data_parallel);
    const auto buffers = megatron_buffers(parameters, ddp).value();
    uint64_t elements = 0;
    const auto wanted = padded_buffer(parameters, alone, size, ddp.data_parallel, &elements);
    ASSERT_EQ(buffers.size(), 1u);
    EXPECT_EQ(buffers[0].offsets, wanted) << round;
    EXPECT_EQ(buffers[0].elements, elements) << round;
    if (HasFailure()) return;
  }
}

TEST(MegatronBuckets, BuffersAreByOptimizerStretchOfLayersAndType) {
  const std::vector<MegatronParameter> parameters = {
      {"model0.embedding.word_embeddings.weight", DType::kBF16, Shape{5}},
      {"model0.decoder.layers.0.A_log", DType::kF32, Shape{7}},
      {"model0.decoder.layers.0.mlp.experts.linear_fc1.weight0", DType::kBF16, Shape{11}},
      {"model1.decoder.layers.0.A_log", DType::kF32, Shape{7}},
      {"model1.decoder.layers.0.w", DType::kBF16, Shape{13}}};
  MegatronDdp ddp;
  ddp.stages = 2;
  const auto text = [&] {
    std::string all;
    const auto buffers = megatron_buffers(parameters, ddp).value();
    for (const MegatronBuffer& buffer : buffers)
      all += fmt::format("{}.{} {} {} at {} of {}; ", buffer.optimizer, buffer.number,
                         dtype_name(buffer.dtype), fmt::join(buffer.parameters, ","),
                         fmt::join(buffer.offsets, ","), buffer.elements);
    return all;
  };
  EXPECT_EQ(text(), fmt::format("0.0 {0} 0,2 at 64,0 of 69; 0.1 {1} 1 at 0 of 7; "
                                "0.2 {1} 3 at 0 of 7; 0.3 {0} 4 at 0 of 13; ",
                                dtype_name(DType::kBF16), dtype_name(DType::kF32)));
  ddp.experts_apart = true;
  EXPECT_EQ(text(), fmt::format("0.0 {0} 0 at 0 of 5; 0.1 {1} 1 at 0 of 7; 0.2 {1} 3 at 0 of 7; "
                                "0.3 {0} 4 at 0 of 13; 1.0 {0} 2 at 0 of 11; ",
                                dtype_name(DType::kBF16), dtype_name(DType::kF32)));
  EXPECT_TRUE(megatron_buffers(
                  std::vector<MegatronParameter>{{"a", DType::kF32, Shape{uint64_t{1} << 63}}}, ddp)
                  .has_error());
}

Found found(uint64_t rank, std::string path) {
  Found file;
  file.rank = rank;
  file.path = std::move(path);
  return file;
}

TEST(MegatronTree, FilesHaveTheNamesOfTheirRanks) {
  std::vector<Found> files;
  for (const char* path : {"iter_0000100/mp_rank_00/model_optim_rng.pt",
                           "iter_0000100/mp_rank_01/model_optim_rng.pt", "progress.txt"}) {
    files.push_back(found(0, path));
    files.back().at = path;
  }
  ASSERT_TRUE(megatron_trees().name_files(true, files).has_value());
  EXPECT_EQ(files[0].path, "model_optim_rng.pt");
  EXPECT_EQ(files[1].path, "model_optim_rng.pt");
  EXPECT_NE(files[0].rank, files[1].rank);
  EXPECT_EQ(files[1].source(), "iter_0000100/mp_rank_01/model_optim_rng.pt");
  EXPECT_EQ(files[2].path, "progress.txt");

  std::vector<Found> below{found(3, "iter_0000100/mp_rank_01_001/model_optim_rng.pt"),
                           found(3, "config.json")};
  ASSERT_TRUE(megatron_trees().name_files(false, below).has_value());
  EXPECT_EQ(below[0].path, "model_optim_rng.pt");
  EXPECT_EQ(below[0].source(), "rank/3/iter_0000100/mp_rank_01_001/model_optim_rng.pt");
  EXPECT_EQ(below[1].source(), "rank/3/config.json");

  std::vector<Found> two{found(3, "mp_rank_01_001/model_optim_rng.pt"),
                         found(3, "mp_rank_00_001/model_optim_rng.pt")};
  EXPECT_THAT(megatron_trees().name_files(false, two).error().message(),
              HasSubstr("a rank has one"));
  std::vector<Found> same{found(3, "mp_rank_01_001/model_optim_rng.pt"),
                          found(3, "model_optim_rng.pt")};
  EXPECT_THAT(megatron_trees().name_files(false, same).error().message(), HasSubstr("remove one"));

  std::vector<Found> own{found(3, "mp_rank_00/a.pt"), found(3, "mp_rank_01/a.pt")};
  ASSERT_TRUE(megatron_trees().name_files(false, own).has_value());
  EXPECT_EQ(own[0].path, "mp_rank_00/a.pt");
  EXPECT_EQ(own[1].path, "mp_rank_01/a.pt");
}

/// A value that is no tensor, as opcodes of a pickle.
class Value {
 public:
  explicit Value(const std::string& opcodes)
      : bytes_("\x80\x02" + opcodes + "."), pickle_(Pickle::parse(bytes_).value()) {}
  TorchPathValue at(Path path) const {
    TorchPathValue value;
    value.path = std::move(path);
    value.pickle = &pickle_;
    value.node = pickle_.root();
    return value;
  }

 private:
  const std::string bytes_;
  const Pickle pickle_;
};

std::string text(std::string_view value) {
  const auto length = static_cast<uint32_t>(value.size());
  return "X" + std::string(reinterpret_cast<const char*>(&length), sizeof length) +
         std::string(value);
}
std::string number_of(double value) {
  std::string bytes(sizeof value, '\0');
  std::memcpy(bytes.data(), &value, sizeof value);
  std::reverse(bytes.begin(), bytes.end());
  return "G" + bytes;
}
std::string list(std::initializer_list<int> numbers) {
  std::string opcodes = "](";
  for (const int one : numbers) opcodes += std::string("K") + static_cast<char>(one);
  return opcodes + "e";
}

const Value& arguments() {
  static const Value value("cargparse\nNamespace\n)\x81}(" + text("num_layers") + "K\4" +
                           text("tensor_model_parallel_size") + "K\2" + text("swiglu") + "\x88" +
                           text("num_query_groups") + "K\1" + text("lr") + number_of(0.5) + "ub");
  return value;
}
const Value& version() {
  static const Value value(number_of(3));
  return value;
}

TorchPathValue tensor(Path path, Shape shape, DType dtype = DType::kF32) {
  TorchPathValue value;
  value.path = std::move(path);
  value.dtype = dtype;
  value.shape = shape;
  return value;
}

struct Written {
  explicit Written(const std::vector<TorchPathValue>& values) {
    const TorchLayout made = compose_torch_file(values).value();
    file.assign(made.zip.file_bytes, '\0');
    for (const ZipWriter::Piece& piece : made.zip.pieces)
      file.replace(piece.offset, piece.bytes.size(), piece.bytes);
  }
  static ReadAt reader(const std::string& bytes) {
    return read_at(std::as_bytes(std::span(bytes)));
  }
  FileOutline outline() {
    text = torch_format().outline(reader(file), file.size(), {}).value();
    return {text, file.size()};
  }
  Result<FileTensors> tensors() {
    PTC_TRY(text, torch_format().outline(reader(file), file.size(), {}));
    return torch_format().tensors({text, file.size()}, "model_optim_rng.pt", {});
  }
  std::string file, text;
};

TEST(MegatronFile, SaysWhatItsArgumentsAre) {
  Written written({arguments().at({key("args")}), version().at({key("checkpoint_version")}),
                   Value("K\x64").at({key("iteration")}), tensor({key("model"), key("w")}, {2})});
  const FileTensors tensors = written.tensors().value();
  ASSERT_TRUE(tensors.megatron);
  EXPECT_EQ(tensors.megatron->iteration, 100);
  EXPECT_EQ(tensors.megatron->argument("num_layers"), 4);
  EXPECT_EQ(tensors.megatron->size("tensor_model_parallel_size"), 2);
  EXPECT_EQ(tensors.megatron->size("pipeline_model_parallel_size"), 1);
  EXPECT_FALSE(tensors.megatron->argument("lr"));
  // Groups of queries count only where they are used.
  EXPECT_EQ(tensors.megatron->config_text(),
            R"({"model_type":"megatron","num_layers":4,"gated_linear_unit":true})");
  EXPECT_FALSE(Written({version().at({key("checkpoint_version")}), tensor({key("w")}, {2})})
                   .tensors()
                   .value()
                   .megatron);
}

/// A stage of a model whose optimizer has all state by number.
std::vector<TorchPathValue> stage(int layers, const Value& decays, const Value& kept,
                                  const Value& first, const Value& second) {
  std::vector<TorchPathValue> values{arguments().at({key("args")}),
                                     version().at({key("checkpoint_version")})};
  const auto group = [](int64_t g, const char* name) {
    return Path{key("optimizer"), key("optimizer"), key("param_groups"), element(g), key(name)};
  };
  const auto add = [&](int64_t at, Shape shape) {
    values.push_back(tensor(
        {key("optimizer"), key("optimizer"), key("state"), number(at), key("exp_avg")}, shape));
  };
  for (int64_t layer = 0; layer < layers; ++layer) {
    const std::string name = fmt::format("decoder.layers.{}.", layer);
    values.push_back(tensor({key("model"), key(name + "norm.weight")}, {2}, DType::kBF16));
    values.push_back(tensor({key("model"), key(name + "w")}, {2, 3}, DType::kBF16));
    add(layer, {2, 3});
    add(layers + layer, {2});
    values.push_back(tensor(
        {key("optimizer"), key("fp32_from_fp16_params"), element(0), element(layer)}, {2, 3}));
  }
  for (int64_t layer = 0; layer < layers; ++layer)
    values.push_back(
        tensor({key("optimizer"), key("fp32_from_fp16_params"), element(1), element(layer)}, {2}));
  values.push_back(decays.at(group(0, "wd_mult")));
  values.push_back(first.at(group(0, "params")));
  values.push_back(kept.at(group(1, "wd_mult")));
  values.push_back(second.at(group(1, "params")));
  return values;
}

std::vector<std::string> names_of(const FileTensors& tensors) {
  std::vector<std::string> names;
  for (const TensorEntry& each : tensors.tensors) names.push_back(each.name);
  return names;
}

TEST(MegatronOptimizer, StateByNumberHasTheNamesOfParameters) {
  const Value decays(number_of(1)), kept(number_of(0)), first(list({0})), second(list({1}));
  Written written(stage(1, decays, kept, first, second));
  const std::vector<std::string> names = names_of(written.tensors().value());
  EXPECT_THAT(names, Contains("optimizer.optimizer.state.decoder.layers.0.w.exp_avg"));
  EXPECT_THAT(names, Contains("optimizer.optimizer.state.decoder.layers.0.norm.weight.exp_avg"));
  EXPECT_THAT(names, Contains("optimizer.fp32_from_fp16_params.decoder.layers.0.w"));
  EXPECT_THAT(names, Contains("optimizer.fp32_from_fp16_params.decoder.layers.0.norm.weight"));

  // Two layers in the place of one: numbers go through the groups again.
  std::vector<NewArray> arrays;
  std::deque<std::string> array_names;
  const std::vector<std::pair<std::string, Shape>> shapes{{"norm.weight", {2}}, {"w", {2, 3}}};
  for (const char* layer : {"0", "1"})
    for (const auto& [name, shape] : shapes) {
      const std::string parameter = fmt::format("decoder.layers.{}.{}", layer, name);
      const auto add = [&](const std::string& one, DType dtype) {
        arrays.push_back({array_names.emplace_back(one), dtype, &shape, arrays.size()});
      };
      add(parameter, DType::kBF16);
      add("optimizer.optimizer.state." + parameter + ".exp_avg", DType::kF32);
      add("optimizer.fp32_from_fp16_params." + parameter, DType::kF32);
    }
  const FileOutline outline = written.outline();
  const std::vector<NewArgument> says{{"tensor_model_parallel_size", 8}, {"lr", 3}};
  const FileLayout made =
      torch_format().lay_out(arrays, std::span(&outline, 1), std::span(says)).value();
  std::string file(made.bytes, '\0');
  for (const Literals::Piece& piece : made.literals.pieces())
    file.replace(piece.offset, piece.bytes.size(), piece.bytes);
  const TorchFile read = TorchFile::read(Written::reader(file), file.size()).value();
  std::map<std::string, uint64_t> offsets;
  for (const TorchTensor& each : read.tensors()) offsets[each.name] = each.offset;
  const auto place = [&](size_t array) {
    for (const auto& [name, offset] : offsets)
      if (offset == made.offsets[array]) return name;
    return std::string("nowhere");
  };
  EXPECT_EQ(place(0), "model.decoder.layers.0.norm.weight");
  EXPECT_EQ(place(1), "optimizer.optimizer.state.2.exp_avg");
  EXPECT_EQ(place(2), "optimizer.fp32_from_fp16_params.1.0");
  EXPECT_EQ(place(4), "optimizer.optimizer.state.0.exp_avg");
  EXPECT_EQ(place(9), "model.decoder.layers.1.w");
  EXPECT_EQ(place(10), "optimizer.optimizer.state.1.exp_avg");
  EXPECT_EQ(place(11), "optimizer.fp32_from_fp16_params.0.1");
  // What was laid out says the same of itself.
  EXPECT_EQ(megatron_file(read)->size("tensor_model_parallel_size"), 8);
  EXPECT_EQ(megatron_file(read)->argument("num_layers"), 4);
}

TEST(MegatronOptimizer, RefusesWhatItsOrderDoesNotTell) {
  const Value decays(number_of(1)), kept(number_of(0));
  const auto why = [&](std::initializer_list<int> first, std::initializer_list<int> second,
                       const Value& of_second) {
    const Value first_list(list(first)), second_list(list(second));
    const auto tensors = Written(stage(2, decays, of_second, first_list, second_list)).tensors();
    return tensors.has_value() ? std::string("taken") : std::string(tensors.error().message());
  };
  EXPECT_EQ(why({0, 1}, {2, 3}, kept), "taken");
  EXPECT_THAT(why({0, 1}, {2}, kept), HasSubstr("cannot be told by their order"));
  EXPECT_THAT(why({0, 1}, {1, 2}, kept), HasSubstr("in two of the optimizer's groups"));
  EXPECT_THAT(why({0, 1}, {2, 4}, kept), HasSubstr("in none of the optimizer's groups"));
  EXPECT_THAT(why({2, 3}, {0, 1}, kept), HasSubstr("has another shape"));
  EXPECT_THAT(why({0, 1}, {2, 3}, decays), HasSubstr("2 groups"));
}

}  // namespace
}  // namespace ptc
