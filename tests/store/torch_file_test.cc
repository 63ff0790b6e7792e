#include "store/codec/torch_file.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <random>

#include "expect_error.h"
#include "pickle_json.h"
#include "store/codec/pickle_writer.h"
#include "store/codec/safetensors.h"
#include "store/codec/torch_layout.h"

namespace ptc {
namespace {

using namespace std::string_literals;

/// Writes files as torch.save does.
class Saver {
 public:
  PickleWriter pickle;

  /// Adds a storage and puts a tensor on it on the pickle's stack.
  void tensor(const std::string& bytes, const char* type, uint64_t item, const Shape& shape,
              const Shape& strides, uint64_t offset = 0) {
    storages_.push_back(bytes);
    tensor_on(static_cast<uint32_t>(storages_.size() - 1), type, item, shape, strides, offset);
  }
  void tensor_on(uint32_t storage, const char* type, uint64_t item, const Shape& shape,
                 const Shape& strides, uint64_t offset = 0) {
    pickle.known_global("torch._utils", "_rebuild_tensor_v2");
    pickle.opcode('(');
    pickle.opcode('(');
    pickle.text("storage");
    pickle.known_global("torch", type);
    pickle.text(std::to_string(storage));
    pickle.text("cpu");
    pickle.integer(static_cast<int64_t>(storages_[storage].size() / item));
    pickle.opcode('t');
    pickle.opcode('Q');
    pickle.integer(static_cast<int64_t>(offset));
    pickle.numbers(shape.begin(), shape.end());
    pickle.numbers(strides.begin(), strides.end());
    pickle.boolean(false);
    pickle.known_global("collections", "OrderedDict");
    for (const char c : {')', 'R', 't', 'R'}) pickle.opcode(c);
  }
  std::string file() && {
    ZipWriter zip;
    zip.add("x/data.pkl", std::move(pickle).finish());
    zip.add("x/byteorder", "little");
    for (size_t i = 0; i < storages_.size(); ++i)
      zip.add("x/data/" + std::to_string(i), storages_[i]);
    return std::move(zip).finish().pieces[0].bytes;
  }

 private:
  std::vector<std::string> storages_;
};

Result<TorchFile> read_saved(const std::string& file) {
  return TorchFile::read(read_at(std::as_bytes(std::span(file))), file.size());
}

TEST(TorchFile, TensorsAndLiteralsByTheirNames) {
  Saver saver;
  saver.pickle.opcode('}');
  saver.pickle.opcode('(');
  saver.pickle.text("a.b");
  saver.tensor("0123456789abcdefghijklmn", "FloatStorage", 4, {2, 3}, {3, 1});
  saver.pickle.text("list");
  for (const char c : {']', '('}) saver.pickle.opcode(c);
  saver.pickle.integer(5);
  saver.tensor_on(0, "FloatStorage", 4, {3, 2}, {1, 3});
  saver.pickle.opcode('e');
  saver.pickle.integer(7);
  saver.tensor_on(0, "FloatStorage", 4, {3}, {1}, 3);
  saver.pickle.opcode('u');
  const std::string bytes = std::move(saver).file();
  auto file = read_saved(bytes);
  ASSERT_TRUE(is_ok(file));
  const auto& tensors = file.value().tensors();
  ASSERT_EQ(tensors.size(), 3u);
  EXPECT_EQ(tensors[0].name, "a.b");
  EXPECT_EQ(bytes.substr(tensors[0].offset, tensors[0].bytes), "0123456789abcdefghijklmn");
  EXPECT_EQ(tensors[1].name, "list.1");
  EXPECT_FALSE(tensors[1].contiguous);
  EXPECT_EQ(tensors[1].storage, tensors[0].storage);
  EXPECT_EQ(tensors[1].bytes, 24u);
  EXPECT_EQ(torch_path_text(file.value().path(tensors[2].place)), "%i7");
  EXPECT_EQ(bytes.substr(tensors[2].offset, tensors[2].bytes), "cdefghijklmn");
  ASSERT_EQ(file.value().literals().size(), 1u);
  EXPECT_EQ(file.value().name(file.value().literals()[0].place), "list.0");
}

TEST(TorchFile, RefusesTensorsThatAreNotInTheirStorage) {
  struct Case {
    Shape shape, strides;
    uint64_t offset;
    const char* part;
  };
  const uint64_t huge = uint64_t{1} << 62;
  for (const Case& c : {Case{{7}, {1}, 0, "do not lie in its storage '0' of 24 bytes"},
                        Case{{6}, {1}, 1, "do not lie"}, Case{{2, 2}, {5, 1}, 0, "do not lie"},
                        Case{{2}, {huge}, 0, "do not lie"}, Case{{huge}, {huge}, 0, "do not lie"},
                        Case{{1}, {1}, huge, "do not lie"}, Case{{huge, huge}, {1, 1}, 0, "shape"},
                        Case{{2, 2}, {1}, 0, "not as torch writes it"}}) {
    Saver saver;
    saver.tensor("0123456789abcdefghijklmn", "FloatStorage", 4, c.shape, c.strides, c.offset);
    EXPECT_TRUE(has_error(read_saved(std::move(saver).file()), Code::kInvalidArgument, c.part));
  }
  for (const auto& [shape, strides] :
       {std::pair(Shape{6}, Shape{1}), std::pair(Shape{100}, Shape{0}),
        std::pair(Shape{0, huge}, Shape{9, 9})}) {
    Saver saver;
    saver.tensor("0123456789abcdefghijklmn", "FloatStorage", 4, shape, strides);
    EXPECT_TRUE(is_ok(read_saved(std::move(saver).file())));
  }
}

TEST(TorchFile, RandomFilesAreReadAndLaidOutAgain) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int trial = 0; trial < 200; ++trial) {
    Saver saver;
    std::map<std::string, std::string> expected;
    int keys = 0;
    auto value = [&](auto&& self, const std::string& name, int depth) -> void {
      const uint64_t what = random() % (depth == 0 ? 5 : 3);
      if (depth < 4 && (what == 0 || depth == 0)) {  // a dict
        for (const char c : {'}', '('}) saver.pickle.opcode(c);
        for (uint64_t n = random() % 5; n > 0; --n) {
          const std::string key = "k" + std::to_string(keys++) + (random() % 3 == 0 ? ".x" : "");
          saver.pickle.text(key);
          self(self, name.empty() ? key : name + "." + key, depth + 1);
        }
        saver.pickle.opcode('u');
      } else if (depth < 4 && what == 1) {  // a list
        for (const char c : {']', '('}) saver.pickle.opcode(c);
        const uint64_t count = random() % 4;
        for (uint64_t i = 0; i < count; ++i) self(self, name + "." + std::to_string(i), depth + 1);
        saver.pickle.opcode('e');
      } else if (random() % 4 == 0) {
        saver.pickle.integer(static_cast<int64_t>(random()) >> random() % 64);
      } else {
        Shape shape, strides;
        uint64_t count = 1;
        for (uint64_t n = random() % 4; n > 0; --n) shape.push_back(random() % 4);
        strides = Dims(shape.size());
        for (size_t axis = shape.size(); axis-- > 0; count *= shape[axis])
          strides[axis] = std::max<uint64_t>(count, 1);
        std::string bytes(2 * count, '\0');
        for (char& c : bytes) c = static_cast<char>(random());
        saver.tensor(bytes, "BFloat16Storage", 2, shape, strides);
        expected[name] = bytes;
      }
    };
    value(value, "", 0);
    const std::string bytes = std::move(saver).file();
    auto file = read_saved(bytes);
    ASSERT_TRUE(is_ok(file));
    auto contents = [](const TorchFile& f, const std::string& from) {
      std::map<std::string, std::string> found;
      for (const TorchTensor& tensor : f.tensors())
        found[tensor.name] = from.substr(tensor.offset, tensor.bytes);
      return found;
    };
    ASSERT_EQ(contents(file.value(), bytes), expected);
    for (const TorchTensor& tensor : file.value().tensors()) EXPECT_TRUE(tensor.contiguous);

    auto layout = lay_out_torch_file(file.value(), same_tensors(file.value()));
    ASSERT_TRUE(is_ok(layout));
    std::string again(layout.value().zip.file_bytes, '?');
    for (const auto& piece : layout.value().zip.pieces)
      again.replace(piece.offset, piece.bytes.size(), piece.bytes);
    for (size_t i = 0; i < file.value().tensors().size(); ++i)
      again.replace(layout.value().tensors[i].offset, layout.value().tensors[i].bytes,
                    expected[file.value().tensors()[i].name]);
    auto second = read_saved(again);
    ASSERT_TRUE(is_ok(second));
    ASSERT_EQ(contents(second.value(), again), expected);
    ASSERT_EQ(second.value().literals().size(), file.value().literals().size());
    for (size_t i = 0; i < file.value().literals().size(); ++i)
      EXPECT_EQ(pickle_json(file.value().pickle(), file.value().literals()[i].node),
                pickle_json(second.value().pickle(), second.value().literals()[i].node));
  }
}

TEST(TorchFile, NewShapesThatCannotBe) {
  Saver saver;
  saver.pickle.opcode(']');
  saver.pickle.opcode('(');
  saver.tensor("0123", "FloatStorage", 4, {1}, {1});
  const uint32_t number = saver.pickle.put();
  saver.pickle.get(number);
  saver.tensor("01234567", "DoubleStorage", 8, {1}, {1});
  saver.pickle.opcode('e');
  const std::string bytes = std::move(saver).file();
  auto file = read_saved(bytes);
  ASSERT_TRUE(is_ok(file));
  auto lay_out = [&](auto&& change) {
    std::vector<TorchNewTensor> tensors = same_tensors(file.value());
    change(tensors);
    return lay_out_torch_file(file.value(), tensors);
  };
  EXPECT_TRUE(is_ok(lay_out([](auto&) {})));
  EXPECT_TRUE(has_error(lay_out([](auto& t) { t.pop_back(); }), Code::kInvalidArgument,
                        "2 new tensors for a file of 3"));
  EXPECT_TRUE(has_error(lay_out([](auto& t) { t[1] = {{5}}; }), Code::kInvalidArgument,
                        "tensor '1': it is the same as '0'"));
  EXPECT_TRUE(has_error(lay_out([](auto& t) { t[2].same_as = 0; }), Code::kInvalidArgument,
                        "tensor '2': the tensor that it shares"));
  EXPECT_TRUE(has_error(lay_out([](auto& t) {
                          t[0].shape = t[1].shape = {uint64_t{1} << 61, 8};
                        }),
                        Code::kInvalidArgument, "shape"));
  EXPECT_TRUE(has_error(lay_out_torch_file(file.value(), same_tensors(file.value()), "a/b"),
                        Code::kInvalidArgument, "no name"));
}

/// A file whose pickle is given, with a storage "0" of 16 bytes.
std::string file_of(const std::string& pickle) {
  ZipWriter zip;
  zip.add("x/data.pkl", pickle);
  zip.add("x/data/0", "0123456789abcdef");
  return std::move(zip).finish().pieces[0].bytes;
}
std::string text(const std::string& value) {
  PickleWriter writer;
  writer.text(value);
  return std::move(writer).finish().substr(2, 5 + value.size());
}
std::string repeated(const std::string& value, size_t times) {
  std::string all;
  for (size_t i = 0; i < times; ++i) all += value;
  return all;
}
std::string storage(const std::string& key, const char* type = "FloatStorage",
                    const std::string& count = "K\4") {
  return "(" + text("storage") + "ctorch\n" + type + "\n" + text(key) + text("cpu") + count + "t";
}
/// Tensors of four floats.
const std::string kTensor =
    "ctorch._utils\n_rebuild_tensor_v2\n("s + storage("0") + "QK\0K\4\x85K\1\x85\x89NtR"s;
/// An object of a class, without arguments, whose state is a dict of these keys and values.
std::string object(const std::string& name, const std::string& state) {
  return "cx\n" + name + "\n)\x81}(" + state + "ub";
}
std::string dtensor(const std::string& mesh, const std::string& placement = "Replicate") {
  return "ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_wrapper_subclass\n"
         "ctorch.distributed.tensor\nDTensor\n)N}(" +
         text("_local_tensor") + kTensor + text("_spec") +
         object("DTensorSpec", text("mesh") + object("DeviceMesh", mesh) + text("placements") +
                                   "cx\n" + placement + "\n)\x81\x85" + text("tensor_meta") +
                                   "cx\nTensorMeta\n(K\4\x85K\1\x85" + "ctorch\nfloat32\nt\x81") +
         "u\x86tR";
}

TEST(TorchFile, StoragesThatCannotBeCopiedAreRefusedAndWhatLooksLikeOneIsNone) {
  const std::string complex =
      "}("s + text("w") + kTensor + text("c") + "ctorch._utils\n_rebuild_tensor_v2\n(";
  auto lay_out = [](const std::string& pickle, std::string_view part = {}) {
    auto file = read_saved(file_of("\x80\2" + pickle + "."));
    EXPECT_TRUE(is_ok(file));
    auto layout = lay_out_torch_file(file.value(), same_tensors(file.value()));
    if (part.empty()) EXPECT_TRUE(is_ok(layout));
    else EXPECT_TRUE(has_error(layout, Code::kInvalidArgument, part));
    return layout ? std::move(layout).value().zip.pieces[0].bytes : "";
  };
  const std::string rest = "QK\0K\1\x85K\1\x85\x89NtRu"s;
  lay_out(complex + storage("0", "ComplexDoubleStorage", "K\1") + rest);
  lay_out(complex + storage("1", "ComplexDoubleStorage", "K\1") + rest,
          "storage '1' is not in the zip archive");
  lay_out("}("s + text("s") + text("0") + "Qu", "not named as torch does");
  // A value of the file's own, which only looks like the id of a storage.
  const std::string own = storage("own", "FloatStorage", "K\4");
  const std::string made = lay_out("}("s + text("w") + kTensor + text("v") + own + "u");
  EXPECT_NE(made.find(text("own")), std::string::npos);
  const std::string same = lay_out("}("s + text("v") + storage("0") + text("w") + kTensor + "u");
  EXPECT_NE(same.find(text("0")), std::string::npos);
}

TEST(TorchFile, FewValuesThatAreUsedVeryOftenAreRefused) {
  const size_t n = 10'000;
  const std::string numbers = "("s + repeated("K\1", 100) + "tq\5",
                    more = "(" + numbers + repeated("h\5", 100) + "tq\6";
  const std::string arguments =
      "("s + storage("0") + "QK\0K\4\x85K\1\x85\x89N}("s + repeated("N\x89", n) + "utq\2";
  const std::string pickles[] = {
      // Pairs with keys that are no names, in a dict that is in a list 10 000 times.
      "]("s + kTensor + "}q\1(" + repeated("NN", n) + "u" + repeated("h\1", n) + "e",
      // A long key.
      "}("s + text(std::string(40 * n, 'k')) + "q\1N" + repeated("h\1N", 4 * n) + "u",
      // What torch says of how tensors are to be read, which many have.
      "ctorch._utils\n_rebuild_tensor_v2\nq\1"
      "0" +
          arguments + "0](" + repeated("h\1h\2R", n) + "e",
      // Ranks of a mesh.
      dtensor(text("_flatten_rank_map") + "(" + more + repeated("h\6", 1000) + "t"),
      dtensor(text("_flatten_rank_map") + "((]q\5" + repeated("h\5", n) + "tq\6" +
              repeated("h\6", n) + "t"),
  };
  for (size_t i = 0; i < std::size(pickles); ++i) {
    SCOPED_TRACE(i);
    auto file = read_saved(file_of("\x80\2" + pickles[i] + "."));
    EXPECT_FALSE(file.has_value());
    if (!file) {
      const std::string message(file.error().message());
      EXPECT_TRUE(message.find("too entangled") != std::string::npos ||
                  message.find("more memory") != std::string::npos)
          << message;
    }
  }
}

TEST(TorchFile, ManyValuesWithoutTensorsBesideOne) {
  auto file = read_saved(file_of("\x80\2](" + kTensor + repeated("N", 100'000) + "e."));
  ASSERT_TRUE(is_ok(file));
  EXPECT_EQ(file.value().literals().size(), 100'000u);
}

TEST(TorchFile, APickleThatIsTooLongIsNotRead) {
  ZipWriter zip;
  zip.add_later("archive/data.pkl", TorchFile::kMostPickleBytes + 1, 0);
  const ZipWriter::Layout made = std::move(zip).finish();
  uint64_t longest = 0;
  const ReadAt read = [&](uint64_t offset, std::span<std::byte> into) -> Result<> {
    longest = std::max<uint64_t>(longest, into.size());
    std::fill(into.begin(), into.end(), std::byte{});
    for (const ZipWriter::Piece& piece : made.pieces) {
      for (size_t i = 0; i < piece.bytes.size(); ++i)
        if (const uint64_t at = piece.offset + i; at >= offset && at - offset < into.size())
          into[at - offset] = static_cast<std::byte>(piece.bytes[i]);
    }
    return ok();
  };
  EXPECT_TRUE(has_error(TorchFile::read(read, made.file_bytes), Code::kInvalidArgument,
                        "its pickle has 134217729 bytes, and at most 134217728 are read"));
  EXPECT_TRUE(has_error(TorchFile::read(read, made.file_bytes), Code::kInvalidArgument,
                        "too many tensors in one file: save them in several, or as safetensors"));
  EXPECT_LT(longest, uint64_t{1} << 20);
}

TEST(TorchFile, AMeshIsReadOnceAndHasTheRanksOfItsOwn) {
  const auto mesh = [](size_t size) {
    return text("_layout") +
           object("Layout", text("shape") + (size == 2 ? "K\2\x85" : "M\0\x8\x85"s)) +
           text("_flatten_rank_map") + "(" + repeated("K\1", 2048) + "t" +
           text("_coordinate_on_dim") + "K\1\x85";
  };
  // The first has the mesh, which all others have, too.
  const std::string first = dtensor(mesh(2048)), name = text("mesh") + "cx\nDeviceMesh\n";
  const size_t begin = first.find(name) + text("mesh").size(), end = first.find(text("placements"));
  const std::string again = first.substr(0, begin) + "h\7" + first.substr(end);
  std::string pickle = "\x80\2](" + first.substr(0, end) + "q\7" + first.substr(end);
  pickle += repeated(again, 600) + "e.";
  auto file = read_saved(file_of(pickle));
  ASSERT_TRUE(is_ok(file));
  ASSERT_EQ(file.value().shardings().size(), 601u);
  for (const TorchSharding& sharding : file.value().shardings())
    EXPECT_EQ(sharding.mesh, file.value().shardings()[0].mesh);
  EXPECT_EQ(file.value().shardings()[0].mesh->ranks.size(), 2048u);

  auto part = read_saved(file_of("\x80\2" + dtensor(mesh(2)) + "."));
  ASSERT_TRUE(is_ok(part));
  EXPECT_EQ(part.value().shardings()[0].mesh->shape, (std::vector<uint64_t>{2}));
  EXPECT_TRUE(part.value().shardings()[0].mesh->ranks.empty());
}

TEST(PickleWriter, NumbersOfAllSizes) {
  for (int bits = 0; bits < 64; ++bits) {
    for (const int64_t base :
         {int64_t{1} << bits, -(int64_t{1} << (bits == 63 ? 62 : bits)), INT64_MIN, INT64_MAX}) {
      for (int64_t more : {-1, 0, 1}) {
        const int64_t number =
            static_cast<int64_t>(static_cast<uint64_t>(base) + static_cast<uint64_t>(more));
        PickleWriter writer;
        writer.integer(number);
        const std::string bytes = std::move(writer).finish();
        auto read = Pickle::parse(bytes);
        ASSERT_TRUE(is_ok(read));
        ASSERT_EQ(read.value().integer(read.value().root()), number);
      }
    }
  }
}

TEST(PickleWriter, ValuesThatContainThemselves) {
  auto copy = [](const std::string& bytes) {
    auto pickle = Pickle::parse(bytes);
    EXPECT_TRUE(is_ok(pickle));
    return copy_pickle(pickle.value());
  };
  EXPECT_TRUE(is_ok(copy("]q\1h\1a.")));
  EXPECT_TRUE(is_ok(copy("cm\nn\n)Rq\1h\1b.")));
  EXPECT_TRUE(is_ok(copy("]q\1(h\1h\1ta.")));
  EXPECT_TRUE(has_error(copy("]q\1h\1\x85q\2"
                             "0h\1h\2a0h\2."),
                        Code::kInvalidArgument, "a tuple contains itself"));
  std::string deep = std::string(500'000, ']') + std::string(499'999, 'a') + ".";
  EXPECT_TRUE(is_ok(copy(deep)));
}

}  // namespace
}  // namespace ptc
