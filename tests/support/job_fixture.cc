#include "tests/support/job_fixture.h"

#include <cstring>
#include <set>

#include "store/codec/npy.h"
#include "store/codec/tensor_path.h"
#include "tests/support/synthetic_model.h"

namespace ptc::testing {
namespace {

template <class T>
T pick(std::mt19937_64& random, std::initializer_list<T> choices) {
  return choices.begin()[random() % choices.size()];
}

std::span<const std::byte> as_bytes(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

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

Sample random_sample(std::mt19937_64& random, bool with_optimizer) {
  Sample sample;
  SlowModel& m = sample.slow;
  m.family = pick<std::string>(random, {"llama", "llama", "gpt2", "bert", "mixtral"});
  m.layers = 1 + random() % 5;
  m.heads = pick<uint64_t>(random, {2, 4, 6, 12});
  const uint64_t head_dim = 1 + random() % 4;
  const uint64_t hidden = m.heads * head_dim;
  m.vocab = 50 + random() % 300;
  const uint64_t inner = 12 * (1 + random() % 4);
  if (m.family == "llama" || m.family == "mixtral") {
    m.kv_heads = pick<uint64_t>(random, {1, 2, m.heads});
    m.tied = m.family == "llama" && random() % 2 == 0;
    m.experts = m.family == "mixtral" ? 4 : 0;
    sample.config = fmt::format(
        R"({{"model_type": "{}", "hidden_size": {}, "num_hidden_layers": {}, "num_attention_heads": {},
        "num_key_value_heads": {}, "intermediate_size": {}, "vocab_size": {}, "head_dim": {},
        "tie_word_embeddings": {}, {} "torch_dtype": "bfloat16"}})",
        m.family, hidden, m.layers, m.heads, m.kv_heads, inner, m.vocab, head_dim, m.tied,
        m.experts > 0 ? R"("num_local_experts": 4,)" : "");
  } else if (m.family == "gpt2") {
    m.tied = true;
    sample.config = fmt::format(
        R"({{"model_type": "gpt2", "n_embd": {}, "n_layer": {}, "n_head": {}, "n_positions": 16,
        "n_inner": {}, "vocab_size": {}, "torch_dtype": "float32"}})",
        hidden, m.layers, m.heads, inner, m.vocab);
  } else {
    m.tied = true;
    sample.config = fmt::format(
        R"({{"model_type": "bert", "hidden_size": {}, "num_hidden_layers": {},
        "num_attention_heads": {}, "intermediate_size": {}, "vocab_size": {}, "type_vocab_size": 2,
        "max_position_embeddings": 16, "torch_dtype": "float32"}})",
        hidden, m.layers, m.heads, inner, m.vocab);
  }
  sample.tensors = synthetic_tensors(sample.config);
  if (with_optimizer) {
    // state.<p>.step has one element and is on the parameter's stage, as the moments are.
    for (TensorInfo& tensor : optimizer_tensors(sample.tensors))
      sample.tensors.push_back(std::move(tensor));
  }
  for (const TensorInfo& tensor : sample.tensors) {
    std::string bytes(num_elements(tensor.shape).value() * dtype_bits(tensor.dtype) / 8, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    sample.bytes.push_back(std::move(bytes));
  }
  return sample;
}

LayoutSpec random_spec(std::mt19937_64& random, const Sample& sample) {
  const SlowModel& m = sample.slow;
  LayoutSpec spec;
  const Model model = synthetic_model(sample.config);
  do {
    spec = LayoutSpec();
    spec.sizes.tp = pick<uint32_t>(random, {1, 2, 3, 4, 6});
    spec.sizes.pp = 1 + random() % std::min<uint64_t>(m.layers, 3);
    spec.sizes.dp = 1 + random() % 2;
    spec.sizes.ep = m.experts > 0 ? pick<uint32_t>(random, {1, 2, 4}) : 1;
    if (random() % 3 == 0 && spec.sizes.pp > 1) {
      uint32_t left = m.layers - spec.sizes.pp;
      for (uint32_t stage = 0; stage < spec.sizes.pp; ++stage) {
        uint32_t extra = stage + 1 == spec.sizes.pp ? left : random() % (left + 1);
        left -= extra;
        spec.stages.push_back(1 + extra);
      }
    }
    if (random() % 4 == 0) spec.order = RankOrder::parse("dp-pp-tp-cp-ep").value();
  } while (model.check(spec).has_error());
  return spec;
}

std::string layout_json(const LayoutSpec& spec) {
  std::string stages;
  for (uint32_t count : spec.stages) stages += fmt::format("{}{}", stages.empty() ? "" : ",", count);
  return fmt::format(R"({{"tp": {}, "pp": {}, "dp": {}, "ep": {}, "cp": {}, "order": "{}"{}}})",
                     spec.sizes.tp, spec.sizes.pp, spec.sizes.dp, spec.sizes.ep, spec.sizes.cp,
                     spec.order.to_string(),
                     stages.empty() ? "" : fmt::format(R"(, "stages": [{}])", stages)) + "\n";
}

std::string safetensors_file(const std::vector<TensorEntry>& entries,
                             const std::vector<std::string>& bytes) {
  std::string header = "{", data;
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

RankParts slow_rank(const Sample& sample, const LayoutSpec& spec, uint64_t rank) {
  RankParts files;
  for (size_t i = 0; i < sample.tensors.size(); ++i) {
    const TensorInfo& tensor = sample.tensors[i];
    auto part = slow_part(sample.slow, tensor, sample.bytes[i], spec, spec.coords(rank));
    if (part) files[tensor.file].emplace(tensor.name, *std::move(part));
  }
  return files;
}

std::map<std::string, std::string> write_ranks(const Sample& sample, const LayoutSpec& spec,
                                               const std::filesystem::path& dir) {
  std::map<std::string, DType> dtypes;
  for (const TensorInfo& tensor : sample.tensors) dtypes[tensor.name] = tensor.dtype;
  std::map<std::string, std::string> written;
  for (uint64_t rank = 0; rank < spec.sizes.world_size(); ++rank) {
    for (auto& [file, parts] : slow_rank(sample, spec, rank)) {
      std::vector<TensorEntry> entries;
      std::vector<std::string> bytes;
      for (auto& [name, part] : parts) {
        TensorEntry entry;
        entry.name = name;
        entry.dtype = dtypes[name];
        for (uint64_t extent : part.shape) entry.shape.push_back(extent);
        entries.push_back(std::move(entry));
        bytes.push_back(std::move(part.bytes));
      }
      written[fmt::format("{}/{}", rank, file)] = safetensors_file(entries, bytes);
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
      EXPECT_TRUE(content.value()->read(begin, std::as_writable_bytes(std::span(window))).has_value());
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
  std::map<std::string, DType> dtypes;
  for (const TensorInfo& tensor : sample.tensors) dtypes[tensor.name] = tensor.dtype;
  for (uint64_t rank = 0; rank < spec.sizes.world_size(); ++rank) {
    const std::string where = fmt::format("{} rank {}", spec.name(), rank);
    RankParts expected = slow_rank(sample, spec, rank);
    auto set = checkpoint.rank_files(spec, rank);
    ASSERT_TRUE(set.has_value()) << where << ": " << set.error().message();
    for (auto& [file, parts] : expected) {
      std::string content = read_content(*set.value(), file);
      auto header = parse_safetensors(
          as_bytes(content).first(safetensors_header_bytes(as_bytes(content).first(8),
                                                           content.size()).value()),
          content.size());
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
        expect_npy(part, dtypes[name], read_content(*tensors.value(), tensor_path(name).value()),
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
    SlowPart whole{{tensor.shape.begin(), tensor.shape.end()}, sample.bytes[i]};
    expect_npy(whole, tensor.dtype, read_content(*set.value(), tensor_path(tensor.name).value()),
               "model/ " + tensor.name);
  }
}

}  // namespace ptc::testing
