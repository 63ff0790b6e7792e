// What ranks write, read and laid out again; and what plans make of several names of one array.
#include "reshard/checkpoint/file_format.h"

#include <gmock/gmock.h>

#include <numeric>

#include "reshard/checkpoint/dcp_table.h"
#include "reshard/checkpoint/dcp_values.h"
#include "reshard/checkpoint/torch_names.h"
#include "reshard/checkpoint/written_torch_file.h"
#include "reshard/exec/image_sums.h"
#include "reshard/plan/planner.h"
#include "store/codec/torch_compose.h"
#include "store/codec/torch_file.h"

namespace ptc {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

using Path = std::vector<TorchStep>;
TorchStep key(std::string text) { return {TorchStep::Kind::kKey, std::move(text), 0}; }
TorchStep element(int64_t number) { return {TorchStep::Kind::kListIndex, {}, number}; }

TorchPathValue tensor(Path path, Shape shape, DType dtype = DType::kF32) {
  TorchPathValue value;
  value.path = std::move(path);
  value.dtype = dtype;
  value.shape = shape;
  return value;
}

/// A torch file in which the bytes of tensor i are all 'a' + i.
std::string torch_file(const std::vector<TorchPathValue>& values) {
  const TorchLayout made = compose_torch_file(values).value();
  std::string file(made.zip.file_bytes, '\0');
  for (const ZipWriter::Piece& piece : made.zip.pieces)
    file.replace(piece.offset, piece.bytes.size(), piece.bytes);
  for (size_t i = 0; i < values.size(); ++i)
    if (values[i].pickle == nullptr && values[i].same_as == TorchTensor::kNone)
      file.replace(made.tensors[i].offset, made.tensors[i].bytes, made.tensors[i].bytes,
                   static_cast<char>('a' + i));
  return file;
}

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

struct Written {
  explicit Written(std::string file_given)
      : file(std::move(file_given)),
        text(torch_format().outline(read_at(bytes_of(file)), file.size(), {}).value()) {}
  FileOutline outline() const { return {text, file.size()}; }
  Result<FileTensors> tensors() const { return torch_format().tensors(outline(), "a.pt", {}); }
  std::string file, text;
};

/// Name → what its bytes are in a file that was laid out, of arrays that are filled by number.
std::vector<std::string> names_in(const FileLayout& layout, size_t arrays, std::string& file) {
  file.assign(layout.bytes, '\0');
  for (const Literals::Piece& piece : layout.literals.pieces())
    file.replace(piece.offset, piece.bytes.size(), piece.bytes);
  const TorchFile read = TorchFile::read(read_at(bytes_of(file)), file.size()).value();
  std::vector<std::string> names;
  for (const TorchTensor& tensor : read.tensors()) {
    const auto at = std::find(layout.offsets.begin(), layout.offsets.end(), tensor.offset);
    names.push_back(fmt::format("{}{}", tensor.name, tensor.shape.to_string()));
    if (at != layout.offsets.end()) names.back() += fmt::format(" {}", at - layout.offsets.begin());
  }
  EXPECT_EQ(layout.offsets.size(), arrays);
  return names;
}

TEST(TorchNames, WithoutWhatEnclosesTheModel) {
  auto names = [](const std::vector<Path>& paths) {
    std::vector<std::string> whole;
    for (const Path& path : paths) whole.push_back(torch_name(path));
    TorchNames all;
    for (size_t i = 0; i < paths.size(); ++i) all.add(whole[i], paths[i]);
    std::vector<std::string> found;
    for (const std::string_view name : std::move(all).finish()) found.emplace_back(name);
    return found;
  };
  EXPECT_THAT(names({{key("model"), key("model.norm.weight")}}), ElementsAre("model.norm.weight"));
  EXPECT_THAT(names({{key("model.norm.weight")}, {key("model")}}),
              ElementsAre("model.norm.weight", "model"));
  EXPECT_THAT(names({{key("state_dict"), key("module"), key("w")}}), ElementsAre("w"));
  EXPECT_THAT(names({{key("model"), key("module.a")}, {key("model"), key("module._orig_mod.b")}}),
              ElementsAre("a", "_orig_mod.b"));
  EXPECT_THAT(names({{key("module.a")}, {key("b")}}), ElementsAre("module.a", "b"));
  EXPECT_THAT(names({{key("model"), key("module.a")},
                     {key("optim"), key("state"), key("module.a"), key("exp_avg")}}),
              ElementsAre("a", "optim.state.module.a.exp_avg"));
  EXPECT_THAT(names({{key("model"), element(0), key("w")}}), ElementsAre("0.w"));
  // One key above the model, whatever it is called.
  EXPECT_THAT(names({{key("app"), key("model"), key("module.a")},
                     {key("app"), key("model"), key("module.b")},
                     {key("app"), key("optim"), key("state"), key("module.a"), key("exp_avg")},
                     {key("app"), key("step")},
                     {key("count")}}),
              ElementsAre("module.a", "module.b", "optim.state.module.a.exp_avg", "step", "count"));
  EXPECT_THAT(names({{key("app"), key("model"), key("w")}, {key("model"), key("v")}}),
              ElementsAre("app.model.w", "v"));
  EXPECT_THAT(names({{key("a"), key("model"), key("w")}, {key("b"), key("model"), key("v")}}),
              ElementsAre("a.model.w", "b.model.v"));
  EXPECT_THAT(names({{key("ema"), key("model"), key("a.w")}, {key("a.w")}}),
              ElementsAre("ema.model.a.w", "a.w"));
  EXPECT_THAT(names({{key("app"), key("model"), key("w")}, {key("app"), key("module"), key("w")}}),
              ElementsAre("app.model.w", "app.module.w"));
  // Two that would be the same keep all of it.
  EXPECT_THAT(names({{key("model"), key("w")}, {key("state_dict"), key("w")}}),
              ElementsAre("model.w", "state_dict.w"));
}

TEST(TorchNames, OutlinesSayWhatTheyAreInside) {
  const Written written(
      torch_file({tensor({key("app"), key("model"), key("a.w")}, {2}),
                  tensor({key("app"), key("optim"), key("a.w"), key("m")}, {3})}));
  auto names = [&](std::string_view text) {
    std::vector<std::string> found;
    const FileTensors tensors =
        torch_format().tensors({text, written.file.size()}, "a.pt", {}).value();
    for (const TensorEntry& tensor : tensors.tensors) found.push_back(tensor.name);
    return found;
  };
  EXPECT_THAT(names(written.text), ElementsAre("a.w", "optim.a.w.m"));
  EXPECT_EQ(written.tensors().value().naming, (TorchNaming{false, "", true, "app"}));
  const TorchNaming other{false, "", true, "net"};
  EXPECT_EQ(in_common(written.tensors().value().naming, other), (TorchNaming{false, "", true}));
  // What was committed before there was such a name has those that it had.
  std::string_view before = written.text;
  ASSERT_TRUE(take_torch_naming(before).has_value());
  EXPECT_THAT(names("ptctorch" + std::string(before)),
              ElementsAre("app.model.a.w", "app.optim.a.w.m"));
  for (size_t bytes = 0; bytes < 40; ++bytes)
    EXPECT_FALSE(torch_format()
                     .tensors({written.text.substr(0, bytes), written.file.size()}, "a.pt", {})
                     .has_value());
}

TEST(TorchNames, AreWithoutTheSameInFilesOfOneName) {
  const Written all(torch_file({tensor({key("module.a")}, {2}), tensor({key("module.b")}, {3})}));
  const Written some(torch_file({tensor({key("module.c")}, {2}), tensor({key("d")}, {3})}));
  const Written optimizer(torch_file({tensor({key("optim"), key("module.a"), key("m")}, {2})}));
  auto names = [](const Written& file, const std::optional<TorchNaming>& as) {
    const std::string text = as ? with_naming(file.text, *as) : file.text;
    std::vector<std::string> found;
    const FileTensors tensors =
        torch_format().tensors({text, file.file.size()}, "a.pt", {}).value();
    for (const TensorEntry& tensor : tensors.tensors) found.push_back(tensor.name);
    return found;
  };
  EXPECT_THAT(names(all, {}), ElementsAre("a", "b"));
  const TorchNaming both = in_common(all.tensors().value().naming, some.tensors().value().naming);
  EXPECT_EQ(both, (TorchNaming{false, "", true}));
  EXPECT_EQ(in_common(optimizer.tensors().value().naming, all.tensors().value().naming),
            (TorchNaming{false, "module.", true}));
  EXPECT_THAT(names(all, both), ElementsAre("module.a", "module.b"));
  EXPECT_THAT(names(some, both), ElementsAre("module.c", "d"));
  const std::string twice = with_naming(with_naming(all.text, both), {false, "module.", true});
  EXPECT_THAT(torch_format().tensors({twice, all.file.size()}, "a.pt", {}).value().tensors[1].name,
              "b");
  for (size_t bytes = 0; bytes < 40; ++bytes)
    EXPECT_FALSE(
        torch_format().tensors({twice.substr(0, bytes), all.file.size()}, "a.pt", {}).has_value());
  // A file of the same kind with other tensors has the same names.
  const std::string text = with_naming(all.text, both);
  const FileOutline outline{text, all.file.size()};
  std::string file;
  const Shape one{1};
  const FileLayout made = torch_format()
                              .lay_out(std::vector<NewArray>{{"module.a", DType::kF32, &one, 0},
                                                             {"module.b", DType::kF32, &one, 1}},
                                       std::span(&outline, 1))
                              .value();
  EXPECT_THAT(names_in(made, 2, file), ElementsAre("module.a[1] 0", "module.b[1] 1"));
}

TEST(TorchFormat, AnOutlineIsTheFileWithoutItsTensors) {
  std::vector<TorchPathValue> values = {
      tensor({key("model"), key("w")}, {2, 3}), tensor({key("model"), key("tied")}, {2, 3}),
      tensor({key("model"), key("none")}, {0, 3}), tensor({key("rng_state")}, {5}, DType::kU8)};
  values[1].same_as = 0;
  const Written written(torch_file(values));
  const FileTensors found = written.tensors().value();
  ASSERT_EQ(found.tensors.size(), 3u);
  EXPECT_EQ(found.tensors[0].name, "w");
  EXPECT_EQ(written.file.substr(found.tensors[0].offset, found.tensors[0].bytes),
            std::string(24, 'a'));
  EXPECT_THAT(found.same_as, ElementsAre(0, 0, 2));
  EXPECT_EQ(written.text.find("aaaa"), std::string::npos);
  EXPECT_NE(written.text.find("ddddd"), std::string::npos);  // the random state is its rank's own
  std::string again(written.file.size(), '\0');
  again.replace(found.tensors[0].offset, 24, 24, 'a');
  for (const Literals::Piece& piece : found.literals.pieces())
    again.replace(piece.offset, piece.bytes.size(), piece.bytes);
  EXPECT_TRUE(again == written.file);
}

TEST(TorchFormat, OtherPartsOfTheSameTensors) {
  std::vector<TorchPathValue> values = {tensor({key("model"), key("w")}, {2, 3}),
                                        tensor({key("model"), key("tied")}, {2, 3}),
                                        tensor({key("rng_state")}, {5}, DType::kU8)};
  values[1].same_as = 0;
  const Written written(torch_file(values));
  const FileOutline outline = written.outline();
  std::string file;
  const Shape all{4, 3}, one_row{1, 3}, two_rows{2, 3};
  FileLayout made = torch_format()
                        .lay_out(std::vector<NewArray>{{"tied", DType::kF32, &all, 7},
                                                       {"w", DType::kF32, &all, 7}},
                                 std::span(&outline, 1))
                        .value();
  EXPECT_EQ(made.offsets[0], made.offsets[1]);
  EXPECT_THAT(names_in(made, 2, file),
              ElementsAre("model.w[4, 3] 0", "model.tied[4, 3] 0", "rng_state[5]"));
  EXPECT_NE(file.find("ccccc"), std::string::npos);
  made = torch_format()
             .lay_out(std::vector<NewArray>{{"tied", DType::kF32, &one_row, 0},
                                            {"w", DType::kF32, &two_rows, 1}},
                      std::span(&outline, 1))
             .value();
  EXPECT_NE(made.offsets[0], made.offsets[1]);  // their parts are others now
}

TEST(TorchFormat, TensorsOfSeveralFiles) {
  auto stage = [](int layer) {
    const std::string name = fmt::format("layers.{}.w", layer);
    return Written(torch_file({tensor({key("model"), key(name)}, {2}),
                               tensor({key("optim"), key("state"), key(name), key("m")}, {2}),
                               tensor({key("rng"), element(0)}, {3}, DType::kU8)}));
  };
  const Written first = stage(0), second = stage(1);
  const std::vector<FileOutline> like = {first.outline(), second.outline()};
  std::string file;
  auto make = [&](std::vector<std::string> names) {
    const Shape two{2};
    std::vector<NewArray> arrays;
    for (const std::string& name : names)
      arrays.push_back({name, DType::kF32, &two, arrays.size()});
    auto made = torch_format().lay_out(arrays, like);
    return made ? names_in(made.value(), arrays.size(), file)
                : std::vector<std::string>{made.error().message()};
  };
  EXPECT_THAT(make({"layers.1.w", "layers.0.w", "optim.state.layers.1.w.m"}),
              UnorderedElementsAre("model.layers.0.w[2] 1", "model.layers.1.w[2] 0",
                                   "optim.state.layers.1.w.m[2] 2", "rng.0[3]"));
  EXPECT_NE(file.find("ccc"), std::string::npos);
  EXPECT_THAT(make({"layers.7.w"}), UnorderedElementsAre("model.layers.7.w[2] 0", "rng.0[3]"));
  EXPECT_THAT(make({"other"}), ElementsAre(HasSubstr("where tensor 'other' belongs")));
}

TEST(TorchFormat, ADamagedOutlineIsAnError) {
  const Written written(torch_file({tensor({key("w")}, {2, 3}), tensor({key("v")}, {3})}));
  for (size_t bytes = 0; bytes < written.text.size(); bytes += 7) {
    const std::string text = written.text.substr(0, bytes);
    EXPECT_FALSE(torch_format().tensors({text, written.file.size()}, "a.pt", {}).has_value());
  }
  EXPECT_FALSE(torch_format().tensors({written.text, 10}, "a.pt", {}).has_value());
}

TEST(DcpTable, IsReadAsItWasWritten) {
  DcpTable table;
  table.tensors.push_back({"w", DType::kBF16, {2, 3}, 64, 12});
  table.boxes.push_back({{4, 0}, {2, 3}});
  table.paths.push_back("model.%i3.w");
  table.values.emplace_back("optim.%l0", "\n\0bytes");
  table.values.emplace_back("%", "");
  const std::string text = dcp_table_text(table);
  const DcpTable read = parse_dcp_table(text, 76).value();
  EXPECT_EQ(read.tensors[0].name, "w");
  EXPECT_EQ(read.boxes, table.boxes);
  EXPECT_EQ(read.paths, table.paths);
  EXPECT_EQ(read.values, table.values);
  EXPECT_THAT(parse_dcp_table(text, 75).error().message(), HasSubstr("damaged: 'w'"));
  table.boxes[0].offset[0] = UINT64_MAX;  // it would end before it begins
  EXPECT_THAT(parse_dcp_table(dcp_table_text(table), 76).error().message(),
              HasSubstr("damaged: 'w'"));
  for (size_t bytes = 0; bytes < text.size(); ++bytes)
    EXPECT_FALSE(parse_dcp_table(text.substr(0, bytes), 76).has_value()) << bytes;
}

TEST(DcpValues, AreOneFileAsTheStateHadThem) {
  DcpTable table;
  auto add = [&](const Path& path, std::vector<TorchPathValue> values) {
    table.values.emplace_back(torch_path_text(path), torch_file(values));
  };
  add({key("a"), element(0)}, {tensor({key("in")}, {2})});
  add({key("a"), element(1)}, {tensor({key("in")}, {3})});
  const std::string file = dcp_values_file(std::span(&table, 1)).value();
  const TorchFile read = TorchFile::read(read_at(bytes_of(file)), file.size()).value();
  ASSERT_EQ(read.tensors().size(), 2u);
  EXPECT_EQ(read.tensors()[1].name, "a.1.in");
  EXPECT_EQ(file.substr(read.tensors()[1].offset, read.tensors()[1].bytes), std::string(12, 'a'));
  table.values.front().first = torch_path_text(Path{key("a"), element(4)});  // a list with holes
  const std::string flat = dcp_values_file(std::span(&table, 1)).value();
  EXPECT_EQ(TorchFile::read(read_at(bytes_of(flat)), flat.size()).value().tensors()[0].name,
            "a.4.in");
  EXPECT_EQ(dcp_values_file({}).value(), "");
}

TEST(OneArrayOfSeveralNames, IsPlannedOnce) {
  const SubTensor whole = SubTensor::whole({4});
  ImageLayout held;
  held.bytes = 100;
  held.literals = Literals(std::vector<Literals::Piece>{{0, "head"}, {90, "tail"}});
  held.arrays = {{0, 8, whole}, {1, 8, whole}, {2, 40, whole}};
  EXPECT_FALSE(is_other_name(held.arrays, 0));
  EXPECT_TRUE(is_other_name(held.arrays, 1));
  EXPECT_FALSE(is_other_name(held.arrays, 2));
  std::vector<ImageLayout> images = {held};
  const SourceIndex source(images, {32, 32, 32});
  ImageLayout target = held;
  target.node = 1;
  const TransferPlan plan = plan_transfers(source, std::span(&target, 1)).value();
  EXPECT_EQ(plan.totals.moved_bytes, 32u);
  EXPECT_EQ(plan.totals.minimum_bytes, 32u);
  EXPECT_EQ(plan.transfers_of(0).value().size(), 2u);

  // All sums are there, and what is beside literals and arrays is padding.
  std::vector<std::byte> bytes(100);
  for (size_t at : {8, 30, 40, 41}) bytes[at] = std::byte(at);
  std::copy_n("head", 4, reinterpret_cast<char*>(bytes.data()));
  std::copy_n("tail", 4, reinterpret_cast<char*>(bytes.data()) + 90);
  const std::vector<TensorFacts> facts(3, {DType::kF32, {4}, {}});
  ImageSums sums = ImageSums::make(held, facts).value();
  bytes[30] = std::byte(0);
  EXPECT_TRUE(sums.padding_is_zero(bytes));
  bytes[30] = std::byte(1);
  EXPECT_FALSE(sums.padding_is_zero(bytes));
  sums.add(0, bytes);
  std::vector<Checksum> found;
  sums.for_each(
      [&](uint32_t, const Box&, uint64_t, uint64_t, const Checksum& sum) { found.push_back(sum); });
  ASSERT_EQ(found.size(), 3u);
  EXPECT_EQ(found[0], found[1]);
  EXPECT_FALSE(found[0] == found[2]);
}

}  // namespace
}  // namespace ptc
