#include "tests/support/job_fixture.h"

#include <spdlog/spdlog.h>

#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <cstring>
#include <set>

#include "reshard/checkpoint/file_format.h"
#include "store/base/json.h"
#include "store/codec/npy.h"
#include "store/codec/pickle_writer.h"
#include "store/codec/tensor_path.h"
#include "store/codec/torch_compose.h"
#include "tests/support/synthetic_model.h"

namespace ptc::testing {
namespace {

std::span<const std::byte> as_bytes(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

/// Hundreds of jobs would bury the line that says what failed; one case alone tells its story.
const bool kQuiet = [] {
  if (std::getenv("PTC_SEED") == nullptr) spdlog::set_level(spdlog::level::warn);
  return true;
}();

}  // namespace

TempDir::TempDir() {
  std::string name = std::filesystem::temp_directory_path() / "ptcfs-test-XXXXXX";
  if (mkdtemp(name.data()) == nullptr) std::abort();
  path_ = name;
}
TempDir::~TempDir() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

void write_file(const std::filesystem::path& path, const std::string& content) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary).write(content.data(), content.size());
}

std::string read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

uint64_t test_seed() {
  if (const char* seed = std::getenv("PTC_SEED")) return std::strtoull(seed, nullptr, 10);
  return std::random_device()();
}

Sample make_sample(std::mt19937_64& random, RandomModel model) {
  Sample sample{std::move(model), {}};
  for (const TensorInfo& tensor : sample.tensors) {
    std::string bytes(num_elements(tensor.shape).value() * dtype_bits(tensor.dtype) / 8, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    sample.bytes.push_back(std::move(bytes));
  }
  return sample;
}

Sample llama_sample(bool with_optimizer, uint32_t layers) {
  RandomModel model;
  model.config = fmt::format(R"({{"model_type": "llama", "hidden_size": 12, "num_hidden_layers": {},
      "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 3, "intermediate_size": 24,
      "vocab_size": 101, "tie_word_embeddings": false, "torch_dtype": "bfloat16"}})",
                             layers);
  model.tensors = synthetic_tensors(model.config);
  if (with_optimizer)
    for (TensorInfo& tensor : optimizer_tensors(model.tensors))
      model.tensors.push_back(std::move(tensor));
  model.oracle = SlowOracle("llama", {{"heads", 4},
                                      {"kv_heads", 2},
                                      {"head_dim", 3},
                                      {"layers", layers},
                                      {"experts", 0},
                                      {"tied", 0},
                                      {"head", 1},
                                      {"gated", 1}});
  model.widest = {.tp = 4};
  std::mt19937_64 random(7);
  return make_sample(random, std::move(model));
}

std::string safetensors_file(const std::vector<TensorEntry>& entries,
                             const std::vector<std::string>& bytes,
                             const std::map<std::string, std::string>& metadata) {
  std::string header = "{", data;
  if (!metadata.empty()) {
    json::object object;
    for (const auto& [key, value] : metadata) object[key] = value;
    header +=
        fmt::format(R"("__metadata__":{}{})", json::serialize(object), entries.empty() ? "" : ",");
  }
  for (size_t i = 0; i < entries.size(); ++i) {
    std::string shape;
    for (uint64_t extent : entries[i].shape)
      shape += fmt::format("{}{}", shape.empty() ? "" : ",", extent);
    header += fmt::format(R"({}"{}":{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})",
                          i == 0 ? "" : ",", entries[i].name, dtype_name(entries[i].dtype), shape,
                          data.size(), data.size() + bytes[i].size());
    data += bytes[i];
  }
  header += "}";
  while (header.size() % 8 != 0) header += ' ';
  std::string file(8, '\0');
  uint64_t length = header.size();
  std::memcpy(file.data(), &length, 8);
  return file + header + data;
}

std::string torch_file(const std::vector<TensorEntry>& entries,
                       const std::vector<std::string>& bytes) {
  std::vector<TorchPathValue> values;
  for (const TensorEntry& entry : entries) {
    TorchPathValue& value = values.emplace_back();
    value.path = {{TorchStep::Kind::kKey, "model", 0}, {TorchStep::Kind::kKey, entry.name, 0}};
    value.dtype = entry.dtype;
    value.shape = entry.shape;
  }
  PickleWriter writer;
  writer.integer(7);
  const std::string seven = std::move(writer).finish();
  const Pickle pickle = Pickle::parse(seven).value();
  TorchPathValue& epoch = values.emplace_back();
  epoch.path = {{TorchStep::Kind::kKey, "epoch", 0}};
  epoch.pickle = &pickle;
  epoch.node = pickle.root();
  const TorchLayout made = compose_torch_file(values).value();
  std::string file(made.zip.file_bytes, '\0');
  for (const ZipWriter::Piece& piece : made.zip.pieces)
    file.replace(piece.offset, piece.bytes.size(), piece.bytes);
  for (size_t i = 0; i < bytes.size(); ++i)
    file.replace(made.tensors[i].offset, bytes[i].size(), bytes[i]);
  return file;
}

void use_torch_files(Sample& sample) {
  constexpr std::string_view kSafetensors = ".safetensors";
  for (TensorInfo& tensor : sample.tensors)
    if (tensor.file.ends_with(kSafetensors))
      tensor.file.replace(tensor.file.size() - kSafetensors.size(), kSafetensors.size(), ".pt");
}

RankParts slow_rank(const Sample& sample, const LayoutSpec& spec, uint64_t rank) {
  RankParts files;
  const RankCoords coords = SlowOracle::place(spec, rank);
  SlowOracle::OfRank of_rank(sample.oracle, spec, coords);
  for (size_t i = 0; i < sample.tensors.size(); ++i) {
    const TensorInfo& tensor = sample.tensors[i];
    const SlowOracle::Held* held = of_rank.held(tensor.name, tensor.shape);
    if (held == nullptr) continue;
    const size_t element = dtype_bits(tensor.dtype) / 8;
    SlowPart part{held->shape, {}, tensor.dtype};
    part.bytes.reserve(held->elements.size() * element);
    for (const auto& global : held->elements)
      global ? part.bytes.append(sample.bytes[i], *global * element, element)
             : part.bytes.append(element, '\0');
    files[tensor.file].emplace(sample.oracle.local_name(tensor.name, spec, coords.pp),
                               std::move(part));
  }
  return files;
}

std::map<std::string, std::string> write_ranks(const Sample& sample, const LayoutSpec& spec,
                                               const std::filesystem::path& dir) {
  std::map<std::string, std::string> written;
  for (uint64_t rank = 0; rank < spec.sizes.world_size(); ++rank) {
    RankParts files = slow_rank(sample, spec, rank);
    // An adapter has nothing on stages without layers; only a file without tensors says so of the
    // first and the last, which usually hold the embedding and the head.
    const uint32_t stage = spec.coords(rank).pp;
    if (files.empty() && (stage == 0 || stage + 1 == spec.sizes.pp))
      files[sample.tensors.front().file];
    for (auto& [file, parts] : files) {
      std::vector<TensorEntry> entries;
      std::vector<std::string> bytes;
      for (auto& [name, part] : parts) {
        TensorEntry entry;
        entry.name = name;
        entry.dtype = part.dtype;
        for (uint64_t extent : part.shape) entry.shape.push_back(extent);
        entries.push_back(std::move(entry));
        bytes.push_back(std::move(part.bytes));
      }
      written[fmt::format("{}/{}", rank, file)] =
          file.ends_with(".pt") ? torch_file(entries, bytes) : safetensors_file(entries, bytes);
    }
    written[fmt::format("{}/rng.bin", rank)] = fmt::format("random state of rank {}", rank);
  }
  written["0/config.json"] = sample.config;
  for (const auto& [path, content] : written) write_file(dir / "rank" / path, content);
  return written;
}

std::string read_content(const FileSet& set, const std::string& path) {
  for (size_t i = 0; i < set.entries().size(); ++i) {
    if (set.entries()[i].path != path) continue;
    Result<FileContentRef> content = set.open(i);
    if (content.has_error()) {
      ADD_FAILURE() << path << ": " << content.error().message();
      return "";
    }
    EXPECT_EQ(content.value()->bytes(), set.entries()[i].bytes) << path;
    std::string text(content.value()->bytes(), '\xee');
    Result<> read = content.value()->read(0, std::as_writable_bytes(std::span(text)));
    EXPECT_TRUE(read.has_value()) << path;
    // Any window holds the same bytes as the whole.
    std::minstd_rand random(text.size());
    for (int n = 0; n < 4 && !text.empty(); ++n) {
      size_t begin = random() % text.size(), length = random() % (text.size() - begin + 1);
      std::string window(length, '\xee');
      EXPECT_TRUE(
          content.value()->read(begin, std::as_writable_bytes(std::span(window))).has_value());
      EXPECT_TRUE(window == text.substr(begin, length)) << path << " [" << begin << ", +" << length;
    }
    return text;
  }
  ADD_FAILURE() << "no file " << path;
  return "";
}

namespace {

void expect_array(const SlowPart& expected, const TensorEntry& entry, const std::string& file,
                  const std::string& what) {
  std::vector<uint64_t> shape(entry.shape.begin(), entry.shape.end());
  EXPECT_EQ(shape, expected.shape) << what;
  EXPECT_TRUE(file.substr(entry.offset, entry.bytes) == expected.bytes) << what;
}

void expect_npy(const SlowPart& expected, DType dtype, const std::string& file,
                const std::string& what) {
  auto entry = parse_npy(as_bytes(file), file.size(), dtype);
  ASSERT_TRUE(entry.has_value()) << what << ": " << entry.error().message();
  expect_array(expected, entry.value(), file, what);
}

}  // namespace

void expect_layout(const Checkpoint& checkpoint, const Sample& sample, const LayoutSpec& spec) {
  for (uint64_t rank = 0; rank < spec.sizes.world_size(); ++rank) {
    const std::string where = fmt::format("{} rank {}", spec.name(), rank);
    RankParts expected = slow_rank(sample, spec, rank);
    auto set = checkpoint.rank_files(spec, rank);
    ASSERT_TRUE(set.has_value()) << where << ": " << set.error().message();
    for (auto& [file, parts] : expected) {
      std::string content = read_content(*set.value(), file);
      const FileFormat& format = format_of(file, false);
      auto outline = format.outline(read_at(as_bytes(content)), content.size(), {});
      ASSERT_TRUE(outline.has_value()) << where << " " << file << ": " << outline.error().message();
      auto header = format.tensors({outline.value(), content.size()}, file, {});
      ASSERT_TRUE(header.has_value()) << where << " " << file << ": " << header.error().message();
      std::set<std::string> names;
      for (const TensorEntry& entry : header.value().tensors) {
        names.insert(entry.name);
        auto part = parts.find(entry.name);
        ASSERT_NE(part, parts.end()) << where << " should not hold " << entry.name;
        expect_array(part->second, entry, content, where + " " + entry.name);
      }
      EXPECT_EQ(names.size(), parts.size()) << where << " " << file;
    }
    auto tensors = checkpoint.rank_tensors(spec, rank);
    ASSERT_TRUE(tensors.has_value()) << where;
    size_t count = 0;
    for (auto& [file, parts] : expected) {
      for (auto& [name, part] : parts) {
        ++count;
        expect_npy(part, part.dtype, read_content(*tensors.value(), tensor_path(name).value()),
                   where + " " + name + ".npy");
      }
    }
    EXPECT_EQ(tensors.value()->entries().size(), count) << where;
  }
}

void expect_model(const Checkpoint& checkpoint, const Sample& sample) {
  auto set = checkpoint.model_files();
  ASSERT_TRUE(set.has_value()) << set.error().message();
  EXPECT_EQ(set.value()->entries().size(), sample.tensors.size());
  for (size_t i = 0; i < sample.tensors.size(); ++i) {
    const TensorInfo& tensor = sample.tensors[i];
    const Shape shape = tensor.shape_in_files();
    SlowPart whole{{shape.begin(), shape.end()}, sample.bytes[i]};
    expect_npy(whole, tensor.dtype, read_content(*set.value(), tensor_path(tensor.name).value()),
               "model/ " + tensor.name);
  }
}

}  // namespace ptc::testing
