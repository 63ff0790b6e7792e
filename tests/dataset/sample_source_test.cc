// Sources of each format: what is a sample, where it lies, what is refused.
#include "dataset/source/sample_source.h"

#include <fmt/format.h>

#include <filesystem>
#include <functional>
#include <thread>

#include "tests/dataset/shard_writers.h"
#include "tests/store/expect_error.h"
#include "tests/store/temp_dir.h"

namespace ptc {
namespace {

class SourceTest : public testing::Test {
 protected:
  Result<SampleSourceRef> open(std::vector<std::string> shards,
                               std::optional<SourceFormat> format = {},
                               OnError on_error = OnError::kRefuse, unsigned threads = 2) {
    for (std::string& shard : shards) shard = dir_.file(shard);
    IndexProgress progress;
    return open_source({format, std::move(shards), on_error}, dir_.file("index"), progress, {},
                       threads);
  }
  void write(const std::string& name, std::string_view content) {
    write_test_file(dir_.file(name), content);
  }

  std::string bytes_of(const SampleSource& source, const Extent& extent) {
    std::string text(extent.bytes, '\0');
    EXPECT_TRUE(
        is_ok(source.read(extent.shard, extent.offset, std::as_writable_bytes(std::span(text)))));
    return text;
  }
  std::string sample(const SampleSource& source, uint64_t id) {
    return bytes_of(source, source.extent(id));
  }
  /// "name=content name=content"
  std::string fields(const SampleSource& source, uint64_t id) {
    auto found = source.fields(id);
    EXPECT_TRUE(is_ok(found));
    std::string text;
    uint64_t sum = source.lacks_newline(id) ? 1 : 0;
    for (const Field& field : found.value()) {
      text += fmt::format("{}{}={}", text.empty() ? "" : " ", field.name,
                          bytes_of(source, field.extent));
      sum += field.extent.bytes;
    }
    EXPECT_EQ(sum, source.payload_bytes(id));
    return text;
  }
  TempDir dir_;
};

TEST_F(SourceTest, TarSamplesAreNeighboursOfOneKey) {
  const std::string a = tar_member("d/a.jpg", "JPEG") + tar_member("d/a.seg.png", "PNG");
  const std::string b = tar_member("d/b.jpg", std::string(600, 'b'));
  const std::string c = tar_member(std::string(150, 'c') + ".jpg", "long", '0', true) +
                        tar_member(std::string(150, 'c') + ".cls", "7");
  write("t/0.tar", tar_member("d/", "", '5') + a + tar_member("README", "ignored") + b + tar_end());
  write("t/1.tar", c + tar_end());
  auto opened = open({"t"});
  ASSERT_TRUE(is_ok(opened));
  const SampleSource& source = *opened.value();
  ASSERT_EQ(source.samples(), 3u);
  EXPECT_EQ(source.format(), SourceFormat::kTar);
  EXPECT_EQ(fields(source, 0), "jpg=JPEG seg.png=PNG");
  EXPECT_EQ(fields(source, 1), "jpg=" + std::string(600, 'b'));
  EXPECT_EQ(fields(source, 2), "jpg=long cls=7");
  EXPECT_EQ(sample(source, 0), a + tar_member("README", "ignored"));
  EXPECT_EQ(sample(source, 1), b);
  EXPECT_EQ(sample(source, 2), c);
  EXPECT_TRUE(source.field_names().empty());
}

TEST_F(SourceTest, TarSaysWhichFieldsAllSamplesHave) {
  write("t/0.tar", tar_shard({{"a", {{"x", "1"}, {"b", "2"}}}, {"c", {{"b", "3"}, {"x", "4"}}}}));
  write("t/1.tar", tar_shard({}));
  EXPECT_EQ(open({"t"}).value()->field_names(), (std::vector<std::string>{"b", "x"}));
}

TEST_F(SourceTest, MembersCountAsWebDatasetCountsThem) {
  // As in test_readers.py, where WebDataset says so.
  write("t/0.tar", tar_member("__top__", "x") + tar_member("__meta__/a.txt", "x") +
                       tar_member("__MACOSX/d/._a.txt", "mac") + tar_member("d/._a.txt", "mac") +
                       tar_member("d/a.txt", "1") + tar_member("d/._b.txt", "mac") +
                       tar_member("d/b.txt", "2") + tar_member("._c.txt", "x") +
                       tar_member("c.txt", "3") + tar_member("v1.0/._e.txt", "x") +
                       tar_member("v1.0/e.txt", "4") + tar_end());
  auto opened = open({"t"});
  ASSERT_TRUE(is_ok(opened));
  std::vector<std::string> found;
  for (uint64_t id = 0; id < opened.value()->samples(); ++id) {
    found.push_back(
        fmt::format("{}: {}", opened.value()->key(id).value(), fields(*opened.value(), id)));
  }
  EXPECT_EQ(found, (std::vector<std::string>{"__MACOSX/d/: _a.txt=mac", "d/: _a.txt=mac",
                                             "d/a: txt=1", "d/: _b.txt=mac", "d/b: txt=2",
                                             "c: txt=3", "v1.0/e: txt=4"}));
  EXPECT_TRUE(opened.value()->keys_repeat());
}

TEST_F(SourceTest, ContentIsPartOfTheFingerprint) {
  const std::string a(5000, 'a'), b = "b" + a.substr(1);
  const std::vector<std::pair<std::string, std::function<void(const std::string&)>>> formats = {
      {"tar",
       [&](const auto& text) {
         write("s/0.tar", tar_shard({{"k", {{"txt", text}}}}));
       }},
      {"jsonl", [&](const auto& text) { write("s/0.jsonl", '"' + text + "\"\n"); }},
      {"tfrecord", [&](const auto& text) { write("s/0.tfrecord", tfrecord(text)); }},
      {"files", [&](const auto& text) { write("s/x.txt", text); }},
      {"mds",
       [&](const auto& text) {
         const std::vector<TestSample> samples = {{"", {{"x", text}}}};
         const std::string shard = mds_shard(samples);
         write("s/0.mds", shard);
         write("s/index.json", mds_index_json(samples, {{"0.mds", shard}}, {1}));
       }},
      {"megatron", [&](const auto& text) {
         write("s/0.bin", text);
         write("s/0.idx", megatron_idx({text}));
       }}};
  for (const auto& [name, write_it] : formats) {
    std::filesystem::remove_all(dir_.file("s"));
    auto indexed_anew = [&] {
      std::filesystem::remove(dir_.file("index"));
      return open({"s"}).value();
    };
    write_it(a);
    const auto before = indexed_anew();
    write_it(b);
    const auto other = indexed_anew();
    EXPECT_NE(before->fingerprint(), other->fingerprint()) << name;
    EXPECT_FALSE(other->has_fingerprint(before->fingerprint())) << name;
    write_it(a);
    EXPECT_EQ(indexed_anew()->fingerprint(), before->fingerprint()) << name;
  }
}

/// In none of the places that are looked at of a large shard.
TEST_F(SourceTest, AllContentIsPartOfTheFingerprintWhereThatIsSaid) {
  std::string text(1'600'000, 'a');
  const std::vector<std::pair<std::string, std::function<std::string(const std::string&)>>>
      formats = {{"s/0.tar",
                  [](const auto& all) {
                    return tar_shard({{"k", {{"txt", all}}}});
                  }},
                 {"s/0.jsonl", [](const auto& all) { return '"' + all + "\"\n"; }},
                 {"s/x.txt", [](const auto& all) { return all; }}};
  for (const auto& [name, make] : formats) {
    std::filesystem::remove_all(dir_.file("s"));
    auto source = [&](const char* of) {
      std::filesystem::remove(dir_.file("index"));
      IndexProgress progress;
      const SourceSpec spec = parse_source(fmt::format(R"({{"shards": "{}", "fingerprint": "{}"}})",
                                                       dir_.file("s"), of))
                                  .value();
      return open_source(spec, dir_.file("index"), progress, {}, 2).value();
    };
    auto fingerprint = [&](const char* of) { return source(of)->fingerprint(); };
    text[654'321] = 'a';
    write(name, make(text));
    const uint64_t places = fingerprint("places"), content = fingerprint("content");
    EXPECT_TRUE(source("content")->has_fingerprint(places)) << "a run begun without it goes on";
    text[654'321] = 'b';
    write(name, make(text));
    if (name != "s/0.jsonl")  // of which all is read to index it
      EXPECT_EQ(fingerprint("places"), places) << name;
    EXPECT_NE(fingerprint("content"), content) << name;
    text[654'321] = 'a';
    write(name, make(text));
    EXPECT_EQ(fingerprint("content"), content) << name;
  }
}

TEST_F(SourceTest, MdsOfMergedDirectories) {
  const std::vector<TestSample> samples = {{"", {{"x", "1"}}}, {"", {{"x", "22"}}}};
  const std::string shard = mds_shard(samples);
  write("m/part-0/shard.00000.mds", shard);
  write("m/deep/part-1/shard.00000.mds", shard);
  auto index = [&](const std::string& name) {
    write("m/index.json",
          mds_index_json(samples, {{"part-0/shard.00000.mds", shard}, {name, shard}}, {2, 2}));
  };
  index("deep/part-1/shard.00000.mds");
  auto opened = open({"m"});
  ASSERT_TRUE(is_ok(opened));
  ASSERT_EQ(opened.value()->samples(), 4u);
  EXPECT_EQ(fields(*opened.value(), 3), "x=22");
  for (const char* bad : {"../m/part-0/shard.00000.mds", "/part-0/shard.00000.mds",
                          "part-0//shard.00000.mds", "part-0/./x.mds", "part-0/"}) {
    index(bad);
    EXPECT_TRUE(has_error(open({"m"}), Code::kInvalidArgument, "beside or below index.json"))
        << bad;
  }
}

TEST_F(SourceTest, BracesNameShards) {
  for (int i = 0; i < 13; ++i) write(fmt::format("b/{:03}.jsonl", i), fmt::format("{}\n", i));
  EXPECT_EQ(open({"b/{000..012}.jsonl"}).value()->samples(), 13u);
  EXPECT_EQ(open({"b/{003..001}.jsonl"}).value()->samples(), 3u);
  EXPECT_EQ(open({"b/0{0,1}*.jsonl"}).value()->samples(), 13u);
  EXPECT_TRUE(has_error(open({"b/{000..013}.jsonl"}), Code::kNotFound, "013.jsonl"));
}

TEST_F(SourceTest, BadTarsAreRefusedWithTheirOffset) {
  const std::string good = tar_member("a.txt", "hello");
  auto refused = [&](const std::string& tar, std::string_view message) {
    write("t/bad.tar", tar);
    return has_error(open({"t/bad.tar"}), Code::kInvalidArgument, message);
  };
  EXPECT_TRUE(refused(good, "bad.tar': byte 1024: the archive ends without its end mark"));
  EXPECT_TRUE(refused(good.substr(0, 700), "a.txt' has 5 bytes, but only 188 follow"));
  EXPECT_TRUE(refused("", "byte 0: the archive ends"));
  EXPECT_TRUE(refused(good + tar_end() + good + tar_end(), "byte 2048: more follows"));
  EXPECT_TRUE(refused(good + std::string(512, 'x'), "byte 1024: no tar header"));
  EXPECT_TRUE(refused(good + good + tar_end(), "byte 1024: 'a.txt' is there twice"));
  EXPECT_TRUE(refused(good + tar_member("b.txt", "") + tar_member("a.png", "") + tar_end(),
                      "byte 1536: the key 'a' was there before, at byte 0"));
  EXPECT_TRUE(refused(tar_member("a.txt", "", '1') + tar_end(), "byte 0: 'a.txt' is a hard link"));
  EXPECT_TRUE(refused(tar_member("a.txt", "", 'S') + tar_end(), "sparse"));
  EXPECT_TRUE(refused(tar_member("a.txt", "", 'M') + tar_end(), "unknown type 'M'"));
  EXPECT_TRUE(refused(tar_member("p", "30 GNU.sparse.size=100000000\n", 'x') + good + tar_end(),
                      "a pax header that is none"));
  EXPECT_TRUE(
      refused(tar_member("p", "22 GNU.sparse.major=1\n", 'x') + good + tar_end(), "sparse"));
  EXPECT_TRUE(
      refused(tar_member("p", "11 path=zz\n", 'g') + good + tar_end(), "global pax header"));
  EXPECT_TRUE(
      refused(tar_member("p", "99999999999999999999 path=zz\n", 'x') + good + tar_end(), "pax"));
  EXPECT_TRUE(refused(tar_member("p", "26 size=99999999999999999\n", 'x') + good + tar_end(),
                      "99999999999999999 bytes, but only"));
  EXPECT_TRUE(
      refused(tar_member("p", "name", 'L') + tar_end(), "byte 0: a long name, and no member"));
  EXPECT_TRUE(refused(tar_member("a." + std::string(200, 'x'), "") + tar_end(), "longer than 128"));
  std::string huge = good + tar_end();
  huge.replace(124, 12, "\x80\x00\x00\x00\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF", 12);
  EXPECT_TRUE(refused(huge, "byte 0: no tar header"));
  write("t/x.tar", "\x1F\x8B\x08 and more");
  EXPECT_TRUE(has_error(open({"t/x.tar"}), Code::kInvalidArgument, "compressed with gzip"));
  write("z/x.tar.gz", "");
  EXPECT_TRUE(has_error(open({"z"}), Code::kInvalidArgument, "decompress it"));
}

TEST_F(SourceTest, TfrecordsAreFrames) {
  write("r/a.tfrecord", tfrecord("one") + tfrecord("") + tfrecord(std::string(3000, 'x')));
  write("r/b.tfrecord-00000-of-00001", tfrecord("last"));
  write("z/as-gzip-begins.tfrecord", tfrecord(std::string(0x088B1F, 'x')));
  EXPECT_EQ(open({"z"}).value()->samples(), 1u);
  auto opened = open({"r"});
  ASSERT_TRUE(is_ok(opened));
  const SampleSource& source = *opened.value();
  ASSERT_EQ(source.samples(), 4u);
  EXPECT_EQ(fields(source, 0), "bin=one");
  EXPECT_EQ(fields(source, 1), "bin=");
  EXPECT_EQ(sample(source, 2), tfrecord(std::string(3000, 'x')));
  EXPECT_EQ(fields(source, 3), "bin=last");

  auto refused = [&](const std::string& records, std::string_view message) {
    write("r/bad.tfrecord", records);
    return has_error(open({"r/bad.tfrecord"}), Code::kInvalidArgument, message);
  };
  const std::string one = tfrecord("one");
  EXPECT_TRUE(refused(one + one.substr(0, 10), "byte 19: 10 bytes are left"));
  EXPECT_TRUE(refused(one + one.substr(0, 17), "byte 19: a record of 3 bytes, but only 1 follow"));
  EXPECT_TRUE(refused(one + std::string(40, 'x'), "byte 19: no TFRecord"));
  const std::string length = le(UINT64_MAX);
  const std::string crc = tfrecord(length).substr(20, 4);
  EXPECT_TRUE(refused(length + crc + std::string(9, 'x'),
                      "byte 0: a record of 18446744073709551615 bytes"));
}

TEST_F(SourceTest, JsonlLines) {
  write("j/a.jsonl", "\xEF\xBB\xBF{\"a\":1}\n\n  \r\n{\"a\":2}\r\n");
  write("j/b.jsonl", "\n{\"a\":3}\n{\"a\":4}");
  write("j/c.jsonl", "");
  auto opened = open({"j"});
  ASSERT_TRUE(is_ok(opened));
  const SampleSource& source = *opened.value();
  ASSERT_EQ(source.samples(), 4u);
  EXPECT_EQ(sample(source, 0), "{\"a\":1}\n\n  \r\n");
  EXPECT_EQ(sample(source, 1), "{\"a\":2}\r\n");
  EXPECT_EQ(sample(source, 2), "{\"a\":3}\n");
  EXPECT_EQ(sample(source, 3), "{\"a\":4}");
  EXPECT_FALSE(source.lacks_newline(2));
  EXPECT_TRUE(source.lacks_newline(3));

  write("j/c.jsonl", "{}\n  hello\n");
  EXPECT_TRUE(has_error(open({"j"}), Code::kInvalidArgument,
                        "c.jsonl': byte 5: no line of JSON: it begins with 'h'"));
  write("j/c.jsonl", "\x1F\x8B\x08 and more");
  EXPECT_TRUE(has_error(open({"j"}), Code::kInvalidArgument, "compressed with gzip"));
}

TEST_F(SourceTest, MdsByItsIndex) {
  const std::vector<TestSample> first = {{"", {{"text", "hello"}, {"id", "12345678"}}},
                                         {"", {{"text", ""}, {"id", "abcdefgh"}}}};
  const std::vector<TestSample> second = {
      {"", {{"text", std::string(5000, 't')}, {"id", "ABCDEFGH"}}}};
  const std::string z = mds_shard(first, {"id"}), a = mds_shard(second, {"id"});
  write("m/z.mds", z);
  write("m/a.mds", a);
  const std::string index = mds_index_json(first, {{"z.mds", z}, {"a.mds", a}}, {2, 1}, {"id"});
  write("m/index.json", index);
  auto opened = open({"m"});
  ASSERT_TRUE(is_ok(opened));
  const SampleSource& source = *opened.value();
  ASSERT_EQ(source.samples(), 3u);
  EXPECT_EQ(fields(source, 0), "id=12345678 text=hello");
  EXPECT_EQ(fields(source, 1), "id=abcdefgh text=");
  EXPECT_EQ(fields(source, 2), "id=ABCDEFGH text=" + std::string(5000, 't'));
  EXPECT_EQ(source.field_names(), (std::vector<std::string>{"id", "text"}));

  auto refused = [&](const std::string& json, const std::string& shard, std::string_view message) {
    write("m/index.json", json);
    write("m/a.mds", shard);
    return has_error(open({"m"}), Code::kInvalidArgument, message);
  };
  auto replaced = [](std::string text, const std::string& from, const std::string& to) {
    return text.replace(text.find(from), from.size(), to);
  };
  EXPECT_TRUE(refused(replaced(index, "\"compression\":null", "\"compression\":\"zstd\""), a,
                      "compressed"));
  EXPECT_TRUE(refused(replaced(index, "z.mds", "../z.mds"), a, "'basename'"));
  EXPECT_TRUE(refused(replaced(index, "\"samples\":1", "\"samples\":2"), a,
                      "byte 0: the shard has 1 samples, but"));
  EXPECT_TRUE(refused(index, a.substr(0, a.size() - 1), "ends here, but index.json says"));
  EXPECT_TRUE(refused("{}", a, "index.json"));
  std::string odd = a;
  odd.replace(8, 4, le(uint32_t{20}));
  EXPECT_TRUE(refused(index, odd, "sample 0 would reach from byte 22 to 20"));
}

TEST_F(SourceTest, MegatronSequences) {
  const std::vector<std::string> sequences = {"aabb", "", "ccddee"};
  const std::string idx = megatron_idx(sequences);
  write("g/x_text_document.bin", "aabbccddee");
  write("g/x_text_document.idx", idx);
  for (const char* name : {"g", "g/x_text_document", "g/x_text_document.bin", "g/*"}) {
    auto opened = open({name});
    ASSERT_TRUE(is_ok(opened)) << name;
    const SampleSource& source = *opened.value();
    ASSERT_EQ(source.samples(), 3u);
    EXPECT_EQ(source.megatron_dtype(), 8);
    for (uint64_t id = 0; id < 3; ++id) EXPECT_EQ(sample(source, id), sequences[id]);
  }
  auto refused = [&](const std::string& bad, std::string_view message) {
    write("g/x_text_document.idx", bad);
    return has_error(open({"g"}), Code::kInvalidArgument, message);
  };
  auto with = [&](size_t at, const std::string& bytes) {
    return std::string(idx).replace(at, bytes.size(), bytes);
  };
  EXPECT_TRUE(refused(idx.substr(0, 20), "too few for its head"));
  EXPECT_TRUE(refused(idx.substr(0, idx.size() - 1), "was cut off, or has modes"));
  EXPECT_TRUE(refused(with(0, "X"), "MMIDIDX"));
  EXPECT_TRUE(refused(with(17, "\x0C"), "unknown type of tokens 12"));
  EXPECT_TRUE(refused(with(18, le(UINT64_MAX / 12)), "byte 18"));
  EXPECT_TRUE(refused(with(34, le(int32_t{-1})), "sequence 0 has -1 tokens"));
  EXPECT_TRUE(refused(with(34, le(INT32_MAX)), "byte 34: sequence 0 has 2147483647 tokens"));
  EXPECT_TRUE(refused(with(34 + 12 + 8, le(uint64_t{2})), "sequence 1 begins at byte 2"));
  EXPECT_TRUE(refused(with(idx.size() - 8, le(uint64_t{9})), "document 3 begins with sequence 9"));
  write("g/x_text_document.bin", "aabbccddeeff");
  EXPECT_TRUE(refused(idx, "covers 10 bytes of the .bin file, which has 12"));
}

TEST_F(SourceTest, FilesOfFoldersInTheOrderOfTheirNames) {
  for (const char* name : {"f/b/2.txt", "f/b.txt", "f/a/x.txt", "f/b/1.txt", "f/.hidden"})
    write(name, name);
  std::filesystem::create_symlink(dir_.file("f/b.txt"), dir_.file("f/link.txt"));
  std::filesystem::create_directory_symlink(dir_.file("f/b"), dir_.file("f/links"));
  auto opened = open({"f"});
  ASSERT_TRUE(is_ok(opened));
  const SampleSource& source = *opened.value();
  std::vector<std::string> found;
  for (uint64_t id = 0; id < source.samples(); ++id) found.push_back(fields(source, id));
  EXPECT_EQ(found, (std::vector<std::string>{"txt=f/a/x.txt", "txt=f/b.txt", "txt=f/b/1.txt",
                                             "txt=f/b/2.txt", "txt=f/b.txt"}));
  EXPECT_EQ(source.field_names(), std::vector<std::string>{"txt"});
  EXPECT_EQ(source.shard_path(2), dir_.file("f/b/1.txt"));

  write("f/b/1.txt", "changed");
  EXPECT_TRUE(has_error(source.read(2, 0, {}), Code::kCorrupt,
                        "1.txt' is not what was indexed: it has 7 bytes and had 9"));
  const auto again = open({"f"}).value();
  std::filesystem::remove(dir_.file("f/a/x.txt"));
  EXPECT_TRUE(has_error(again->read(0, 0, {}), Code::kCorrupt, "it is gone"));
  EXPECT_EQ(open({"f"}).value()->samples(), 4u);
}

TEST_F(SourceTest, AShardThatIsCutShortWhileItIsRead) {
  write("j/0.jsonl", "\"" + std::string(20000, 'x') + "\"\n");
  const auto source = open({"j"}).value();
  const OpenShard shard = source->open_shard(0).value();
  for (const Stores stores : {Stores::kPlain, Stores::kPastCaches}) {
    std::string text(20003, '\0');
    EXPECT_TRUE(is_ok(source->read(shard, 0, std::as_writable_bytes(std::span(text)), stores)));
    EXPECT_EQ(text, "\"" + std::string(20000, 'x') + "\"\n");
  }
  std::filesystem::resize_file(dir_.file("j/0.jsonl"), 9000);
  for (const Stores stores : {Stores::kPlain, Stores::kPastCaches}) {
    std::string text(20003, '\0');
    EXPECT_TRUE(has_error(source->read(shard, 0, std::as_writable_bytes(std::span(text)), stores),
                          Code::kCorrupt,
                          "0.jsonl' is not what was indexed: it ends at byte 9000"));
    text.resize(5000);
    EXPECT_TRUE(is_ok(source->read(shard, 0, std::as_writable_bytes(std::span(text)), stores)));
  }
}

TEST_F(SourceTest, TheFormatIsSeenOrAskedFor) {
  write("a/x.tar", tar_end());
  write("a/y.jsonl", "{}\n");
  EXPECT_TRUE(has_error(open({"a"}), Code::kInvalidArgument, "several kinds"));
  EXPECT_EQ(open({"a"}, SourceFormat::kJsonl).value()->samples(), 1u);
  EXPECT_EQ(open({"a"}, SourceFormat::kFiles).value()->samples(), 2u);
  EXPECT_EQ(open({"a/*.jsonl"}).value()->samples(), 1u);
  EXPECT_TRUE(
      has_error(open({"a/x.tar", "a/y.jsonl"}), Code::kInvalidArgument, "looks like jsonl"));
  EXPECT_TRUE(has_error(open({"a/y.jsonl", "a/*.jsonl"}), Code::kInvalidArgument, "named twice"));
  write("deep/er/x.jsonl", "{}\n");
  write("deep/notes.txt", "");
  EXPECT_TRUE(
      has_error(open({"deep"}), Code::kInvalidArgument, "shards of jsonl lie below the directory"));
  EXPECT_EQ(open({"deep/*/"}).value()->samples(), 1u);
  EXPECT_EQ(open({"deep"}, SourceFormat::kFiles).value()->samples(), 2u);
  EXPECT_TRUE(has_error(open({"nothing"}), Code::kNotFound, "nothing"));
  EXPECT_TRUE(has_error(open({"a/*.tfrecord"}), Code::kNotFound, "no file matches"));
  EXPECT_TRUE(
      has_error(open({"a"}, SourceFormat::kTfrecord), Code::kNotFound, "no tfrecord shard"));
}

TEST_F(SourceTest, ABadShardIsRefusedOrSkippedAndCounted) {
  write("r/0.tfrecord", tfrecord("zero"));
  write("r/1.tfrecord", "rubbish that is no record");
  write("r/2.tfrecord", tfrecord("two"));
  EXPECT_TRUE(has_error(open({"r"}), Code::kInvalidArgument, "1.tfrecord': byte 0: no TFRecord"));
  EXPECT_FALSE(std::filesystem::exists(dir_.file("index")));
  auto opened = open({"r"}, {}, OnError::kSkip);
  ASSERT_TRUE(is_ok(opened));
  EXPECT_EQ(opened.value()->samples(), 2u);
  ASSERT_EQ(opened.value()->skipped().size(), 1u);
  EXPECT_EQ(opened.value()->skipped()[0].path, dir_.file("r/1.tfrecord"));
  EXPECT_NE(opened.value()->skipped()[0].reason.find("no TFRecord"), std::string::npos);
  EXPECT_EQ(fields(*opened.value(), 1), "bin=two");
  write("r/1.tfrecord", tfrecord("one"));
  EXPECT_EQ(open({"r"}, {}, OnError::kSkip).value()->samples(), 3u);
}

TEST_F(SourceTest, TheIndexIsKeptWhileItIsTrue) {
  write("r/0.tfrecord", tfrecord("zero"));
  write("r/1.tfrecord", tfrecord("one"));
  const auto first = open({"r"}).value();
  const auto written = std::filesystem::last_write_time(dir_.file("index"));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(open({"r"}).value()->fingerprint(), first->fingerprint());
  EXPECT_EQ(std::filesystem::last_write_time(dir_.file("index")), written);

  write("r/1.tfrecord", tfrecord("ONE!"));
  EXPECT_TRUE(has_error(first->read(1, 0, {}), Code::kCorrupt, "it has 20 bytes and had 19"));
  const auto second = open({"r"}).value();
  EXPECT_NE(second->fingerprint(), first->fingerprint());
  EXPECT_EQ(fields(*second, 1), "bin=ONE!");

  std::string damaged = read_test_file(dir_.file("index"));
  damaged[damaged.size() / 2] ^= 1;
  write("index", damaged);
  EXPECT_EQ(open({"r"}).value()->fingerprint(), second->fingerprint());
  write("index", damaged.substr(0, 30));
  EXPECT_EQ(open({"r"}).value()->fingerprint(), second->fingerprint());
}

TEST_F(SourceTest, TheIndexIsTheSameOnAnyNumberOfThreads) {
  std::vector<std::string> names;
  for (int i = 0; i < 40; ++i) {
    std::string records;
    for (int k = 0; k < i * 7 % 200; ++k)
      records += tfrecord(std::string(static_cast<size_t>(k * i % 300), 'x'));
    write(fmt::format("r/{:03}.tfrecord", i), records);
  }
  (void)open({"r"}, {}, OnError::kRefuse, 1).value();
  const std::string alone = read_test_file(dir_.file("index"));
  std::filesystem::remove(dir_.file("index"));
  (void)open({"r"}, {}, OnError::kRefuse, 7).value();
  EXPECT_EQ(read_test_file(dir_.file("index")), alone);
}

TEST_F(SourceTest, TheFingerprintIsThatOfTheDataAndNotOfTheMachine) {
  for (const char* folder : {"one", "two"}) {
    write(std::string(folder) + "/0.jsonl", "{}\n{}\n");
    write(std::string(folder) + "/1.jsonl", "[]\n");
  }
  const uint64_t one = open({"one"}).value()->fingerprint();
  EXPECT_EQ(open({"two"}).value()->fingerprint(), one);
  write("two/1.jsonl", "[1]\n");
  EXPECT_NE(open({"two"}).value()->fingerprint(), one);
  EXPECT_NE(open({"one", "two"}).value()->fingerprint(), one);
}

TEST_F(SourceTest, SixBytesASampleAreEnough) {
  std::string lines, records;
  for (int i = 0; i < 100'000; ++i) lines += "{}\n";
  for (int i = 0; i < 20'000; ++i)
    records += tfrecord(std::string(static_cast<size_t>(i % 97 == 0 ? 30000 : 3), 'x'));
  write("j/a.jsonl", lines);
  write("r/a.tfrecord", records);
  for (const char* folder : {"j", "r"}) {
    const auto source = open({folder}).value();
    EXPECT_LE(static_cast<double>(source->index_bytes()),
              6.0 * static_cast<double>(source->samples()))
        << folder;
  }
}

TEST_F(SourceTest, BuildingStops) {
  write("r/0.tfrecord", tfrecord("zero"));
  std::stop_source stop;
  stop.request_stop();
  IndexProgress progress;
  EXPECT_TRUE(has_error(
      open_source({{}, {dir_.file("r")}, {}}, dir_.file("index"), progress, stop.get_token(), 2),
      Code::kCancelled));
}

}  // namespace
}  // namespace ptc
