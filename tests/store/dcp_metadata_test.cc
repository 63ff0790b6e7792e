#include "store/codec/dcp_metadata.h"

#include <algorithm>
#include <random>

#include "expect_error.h"
#include "store/codec/dcp_compose.h"
#include "store/codec/pickle_writer.h"

namespace ptc {
namespace {

constexpr const char* kModule = "torch.distributed.checkpoint.metadata";

/// Writes metadata as torch does.
class Writer {
 public:
  Writer() {
    object(kModule, "Metadata");
    begin_state();
    p_.text("state_dict_metadata");
    p_.opcode('}'), p_.opcode('(');
  }
  void tensor(const std::string& name, const Shape& shape, const std::vector<Box>& boxes,
              const char* dtype = "float32") {
    p_.text(name);
    object(kModule, "TensorStorageMetadata");
    begin_state();
    p_.text("properties");
    object(kModule, "TensorProperties");
    p_.opcode('(');
    p_.known_global("torch", dtype);
    p_.opcode('t'), p_.opcode('b');
    p_.text("size");
    p_.numbers(shape.begin(), shape.end());
    p_.text("chunks");
    p_.opcode(']'), p_.opcode('(');
    for (const Box& box : boxes) {
      object(kModule, "ChunkStorageMetadata");
      begin_state();
      p_.text("offsets");
      p_.numbers(box.offset.begin(), box.offset.end());
      p_.text("sizes");
      p_.numbers(box.extent.begin(), box.extent.end());
      end_state();
    }
    p_.opcode('e');
    end_state();
  }
  void items() {
    p_.opcode('u');
    p_.text("storage_data");
    p_.opcode('}'), p_.opcode('(');
  }
  void item(const std::string& name, const Dims& offset, std::optional<int64_t> index,
            const std::string& file, int64_t at, int64_t length) {
    object(kModule, "MetadataIndex");
    begin_state();
    p_.text("fqn"), p_.text(name);
    p_.text("offset"), p_.numbers(offset.begin(), offset.end());
    if (index) p_.text("index"), p_.integer(*index);
    end_state();
    object("torch.distributed.checkpoint.filesystem", "_StorageInfo");
    begin_state();
    p_.text("relative_path"), p_.text(file);
    p_.text("offset"), p_.integer(at);
    p_.text("length"), p_.integer(length);
    end_state();
  }
  Result<DcpMetadata> read() && {
    p_.opcode('u');
    end_state();
    const std::string bytes = std::move(p_).finish();
    return parse_dcp_metadata(bytes);
  }

 private:
  void object(const char* module, const char* name) {
    p_.known_global(module, name);
    p_.opcode(')'), p_.opcode('\x81');
  }
  void begin_state() { p_.opcode('}'), p_.opcode('('); }
  void end_state() { p_.opcode('u'), p_.opcode('b'); }
  PickleWriter p_;
};

/// Metadata of one tensor whose chunks lie one after the other in a file.
Result<DcpMetadata> one(const Shape& shape, const std::vector<Box>& boxes, bool hints = true) {
  Writer writer;
  writer.tensor("w", shape, boxes);
  writer.items();
  for (size_t i = 0; i < boxes.size(); ++i)
    writer.item("w", boxes[i].offset, hints ? std::optional<int64_t>(i) : std::nullopt,
                "__0_0.distcp", static_cast<int64_t>(i * 10000), 10000);
  return std::move(writer).read();
}

/// A box cut in pieces, again and again along whole faces.
void cut(std::mt19937_64& random, const Box& box, int depth, std::vector<Box>& out) {
  const size_t axis = box.axes() == 0 ? 0 : random() % box.axes();
  if (depth == 0 || box.axes() == 0 || box.extent[axis] < 2) return out.push_back(box);
  Box left = box, right = box;
  left.extent[axis] = 1 + random() % (box.extent[axis] - 1);
  right.offset[axis] += left.extent[axis];
  right.extent[axis] -= left.extent[axis];
  cut(random, left, depth - 1, out), cut(random, right, depth - 1, out);
}

TEST(DcpMetadata, ChunksThatTileAreTakenAndOthersAreNot) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int trial = 0; trial < 300; ++trial) {
    Shape shape;
    for (uint64_t n = random() % 4; n > 0; --n) shape.push_back(1 + random() % 9);
    std::vector<Box> boxes;
    cut(random, Box::whole(shape), static_cast<int>(random() % 6), boxes);
    std::shuffle(boxes.begin(), boxes.end(), random);
    auto read = one(shape, boxes, trial % 2 == 0);
    ASSERT_TRUE(is_ok(read));
    ASSERT_EQ(read.value().tensors.size(), 1u);
    for (size_t i = 0; i < boxes.size(); ++i) {
      EXPECT_EQ(read.value().tensors[0].chunks[i].box, boxes[i]);
      EXPECT_EQ(read.value().tensors[0].chunks[i].item.offset, i * 10000);
    }
    if (boxes.size() < 2) continue;
    std::vector<Box> fewer(boxes.begin() + 1, boxes.end());
    EXPECT_TRUE(
        has_error(one(shape, fewer), Code::kInvalidArgument, "tensor 'w': its chunks hold"));
    // One that reaches into its neighbour: overlap, or hole elsewhere.
    Box& box = boxes[random() % boxes.size()];
    const size_t axis = random() % box.axes();
    if (box.offset[axis] == 0) continue;
    --box.offset[axis];
    if (trial % 4 < 2) ++box.extent[axis];
    EXPECT_TRUE(has_error(one(shape, boxes), Code::kInvalidArgument));
  }
}

TEST(DcpMetadata, APinwheelIsNoHarm) {  // no face goes through all of it
  EXPECT_TRUE(is_ok(one(
      {3, 3},
      {{{0, 0}, {1, 2}}, {{0, 2}, {2, 1}}, {{2, 1}, {1, 2}}, {{1, 0}, {2, 1}}, {{1, 1}, {1, 1}}})));
}

TEST(DcpMetadata, EmptyChunksNeedNoFile) {
  Writer writer;
  writer.tensor("w", {2}, {{{0}, {2}}, {{2}, {0}}, {{2}, {0}}});
  writer.tensor("e", {0, 3}, {{{0, 0}, {0, 3}}});
  writer.items();
  writer.item("w", {0}, {}, "f", 0, 8);
  writer.item("w", {2}, {}, "f", 8, 100);
  EXPECT_TRUE(is_ok(std::move(writer).read()));
}

TEST(DcpMetadata, RefusesWhatLies) {
  auto read = [](auto&& items) {
    Writer writer;
    writer.tensor("w", {4}, {{{0}, {2}}, {{2}, {2}}});
    writer.items();
    items(writer);
    return std::move(writer).read();
  };
  auto good = [](Writer& w) { w.item("w", {0}, 0, "a", 0, 8), w.item("w", {2}, 1, "a", 8, 8); };
  EXPECT_TRUE(is_ok(read(good)));
  EXPECT_TRUE(has_error(read([](Writer& w) { w.item("w", {0}, 0, "a", 0, 8); }),
                        Code::kInvalidArgument, "nobody says in which file its chunk [2:4] is"));
  EXPECT_TRUE(has_error(
      read([](Writer& w) { w.item("w", {0}, 0, "a", 0, 7), w.item("w", {2}, 1, "a", 8, 8); }),
      Code::kInvalidArgument, "has 7 bytes in 'a'"));
  EXPECT_TRUE(has_error(
      read([](Writer& w) { w.item("w", {0}, 0, "a", 0, 9), w.item("w", {2}, 1, "a", 8, 8); }),
      Code::kInvalidArgument, "items at bytes 0 and 8 overlap"));
  EXPECT_TRUE(has_error(read([&](Writer& w) { good(w), w.item("w", {2}, 1, "b", 8, 8); }),
                        Code::kInvalidArgument, "is stored twice"));
  EXPECT_TRUE(has_error(read([&](Writer& w) { good(w), w.item("w", {1}, 1, "b", 8, 8); }),
                        Code::kInvalidArgument, "a chunk at [1] is stored, but not described"));
  EXPECT_TRUE(has_error(read([&](Writer& w) { good(w), w.item("v", {1}, 1, "b", 8, 8); }),
                        Code::kInvalidArgument, "'v': it is stored, but not described"));
  for (const char* name : {"", ".", "..", "a/b", "/a"})
    EXPECT_TRUE(has_error(read([&](Writer& w) { w.item("w", {0}, 0, name, 0, 8); }),
                          Code::kInvalidArgument, "no name of a file"));
  EXPECT_TRUE(has_error(read([](Writer& w) { w.item("w", {0}, 0, "a", -1, 8); }),
                        Code::kInvalidArgument, "not said as torch does"));
  EXPECT_TRUE(has_error(read([](Writer& w) { w.item("w", {0}, 0, "a", INT64_MAX, 8); }),
                        Code::kInvalidArgument, "beyond 2^63"));
  EXPECT_TRUE(has_error(one({4}, {{{0}, {5}}}), Code::kInvalidArgument, "not within"));
  EXPECT_TRUE(has_error(one({4}, {{{5}, {0}}}), Code::kInvalidArgument, "not within"));
  EXPECT_TRUE(
      has_error(one({4}, {{{0, 0}, {4, 1}}}), Code::kInvalidArgument, "has 2 axes, the tensor 1"));
  EXPECT_TRUE(
      has_error(one({uint64_t{1} << 40, uint64_t{1} << 40}, {}), Code::kInvalidArgument, "shape"));
  EXPECT_TRUE(has_error(parse_dcp_metadata("N."), Code::kInvalidArgument, "but None"));

  auto metadata = read(good);
  EXPECT_TRUE(is_ok(check_dcp_files(metadata.value(), std::vector<uint64_t>{16})));
  EXPECT_TRUE(has_error(check_dcp_files(metadata.value(), std::vector<uint64_t>{15}),
                        Code::kInvalidArgument, "file 'a' has 15 bytes, but 'w'"));
}

TEST(DcpMetadata, FewValuesThatAreUsedVeryOftenAreRefused) {
  // A chunk with much else in its state, which a tensor has 10 000 times.
  auto repeated = [](const std::string& value, size_t times) {
    std::string all;
    for (size_t i = 0; i < times; ++i) all += value;
    return all;
  };
  auto text = [](const std::string& value) {
    return "\x8c" + std::string(1, static_cast<char>(value.size())) + value;
  };
  auto object = [&](const char* name, const std::string& state) {
    return "c" + std::string(kModule) + "\n" + name + "\n)\x81}(" + state + "ub";
  };
  const std::string chunk =
      object("ChunkStorageMetadata", text("offsets") + std::string("K\0\x85", 3) + text("sizes") +
                                         "K\4\x85" + repeated("NN", 10'000)) +
      "q\1";
  const std::string properties = "c" + std::string(kModule) +
                                 "\nTensorProperties\n)\x81"
                                 "ctorch\nfloat32\n\x85"
                                 "b";
  const std::string tensor = object(
      "TensorStorageMetadata", text("properties") + properties + text("size") + "K\4\x85" +
                                   text("chunks") + "](" + chunk + repeated("h\1", 10'000) + "e");
  const std::string bytes = "\x80\4" +
                            object("Metadata", text("state_dict_metadata") + "}" + text("w") +
                                                   tensor + "s" + text("storage_data") + "}") +
                            ".";
  EXPECT_TRUE(has_error(parse_dcp_metadata(bytes), Code::kInvalidArgument, "too entangled"));
}

TEST(DcpMetadata, SixteenThousandRanksTakeNoTimeToCheck) {
  std::vector<Box> boxes;
  for (uint64_t row = 0; row < 128; ++row)
    for (uint64_t column = 0; column < 128; ++column) boxes.push_back({{row, column * 2}, {1, 2}});
  EXPECT_TRUE(is_ok(one({128, 256}, boxes)));
  EXPECT_TRUE(is_ok(one({128, 256}, boxes, false)));
}

TEST(DcpComposeTest, IsReadAsItWasMade) {
  const Box upper{{0, 0}, {2, 3}}, lower{{2, 0}, {1, 3}};
  const TorchStep model{TorchStep::Kind::kKey, "model", 0},
      third{TorchStep::Kind::kListIndex, {}, 3};
  PickleWriter writer;
  writer.text("text");
  const std::string bytes = std::move(writer).finish();
  const Pickle text = Pickle::parse(bytes).value();
  const std::string archive = save_value(text, text.root()).value();
  const std::vector<DcpNewTensor> tensors = {
      {"model.3", {model, third}, DType::kBF16, {3, 3}, {upper, lower}},
      {"none", {}, DType::kF32, {0, 4}, {Box::whole({0, 4})}},
      {"one", {}, DType::kI64, {}, {Box::whole({})}}};
  const std::vector<DcpNewValue> values = {{"a.b", {}, archive}};
  const DcpNewCheckpoint made = compose_dcp(tensors, values, 1500).value();
  const DcpMetadata read = parse_dcp_metadata(made.metadata).value();
  ASSERT_EQ(read.tensors.size(), 3u);
  EXPECT_EQ(read.tensors[0].path, tensors[0].path);
  EXPECT_EQ(read.tensors[0].chunks[1].box, lower);
  EXPECT_GT(made.files.size(), 1u);
  std::vector<uint64_t> sizes;
  std::vector<std::string> files;
  for (const std::string& name : read.files) {
    const auto file = std::find_if(made.files.begin(), made.files.end(),
                                   [&](const DcpNewFile& one) { return one.name == name; });
    ASSERT_NE(file, made.files.end());
    sizes.push_back(file->bytes);
    files.emplace_back(file->bytes, 'x');
    for (const ZipWriter::Piece& piece : file->pieces)
      files.back().replace(piece.offset, piece.bytes.size(), piece.bytes);
  }
  ASSERT_TRUE(is_ok(check_dcp_files(read, sizes)));
  for (size_t t = 0; t < tensors.size(); ++t) {
    for (size_t c = 0; c < tensors[t].chunks.size(); ++c) {
      const DcpItem& item = read.tensors[t].chunks[c].item;
      const DcpArray array = find_dcp_array(read_at(std::as_bytes(std::span(files[item.file]))),
                                            item, tensors[t].dtype, tensors[t].chunks[c].extent)
                                 .value();
      EXPECT_EQ(array.offset, made.places[t][c].offset);
    }
  }
  const DcpItem& item = read.values.at(0).item;
  EXPECT_EQ(files[item.file].substr(item.offset, item.length), archive);
  EXPECT_TRUE(has_error(
      compose_dcp(std::vector<DcpNewTensor>{{"w", {}, DType::kF4, {2}, {Box::whole({2})}}}, {}, 1),
      Code::kInvalidArgument, "torch has no type F4"));
}

}  // namespace
}  // namespace ptc
