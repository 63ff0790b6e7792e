#include "tests/dataset/shard_writers.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "store/base/crc32c.h"

namespace ptc {
namespace {

std::string tar_block(std::string_view name, size_t size, char type) {
  std::string block(512, '\0');
  block.replace(0, std::min<size_t>(name.size(), 100), name.substr(0, 100));
  block.replace(100, 24,
                std::string("0000640\0"
                            "0001750\0"
                            "0000144\0",
                            24));
  block.replace(124, 24, fmt::format("{:011o}{}{:011o}{}", size, '\0', 1'700'000'000, '\0'));
  block[156] = type;
  block.replace(257, 8,
                std::string("ustar\0"
                            "00",
                            8));
  block.replace(148, 8, 8, ' ');
  unsigned sum = 0;
  for (unsigned char c : block) sum += c;
  block.replace(148, 8, fmt::format("{:06o}{} ", sum, '\0'));
  return block;
}

std::string padded(std::string_view data) {
  std::string text(data);
  text.resize((data.size() + 511) / 512 * 512);
  return text;
}

std::string pax_record(std::string_view key, std::string_view value) {
  size_t length = 0;
  std::string record;
  do record = fmt::format("{} {}={}\n", ++length, key, value);
  while (record.size() != length);
  return record;
}

uint32_t mask(std::string_view data) {
  const uint32_t crc = crc32c_by_table(std::as_bytes(std::span(data)));
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
}

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

std::vector<std::pair<std::string, std::string>> sorted(const TestSample& sample) {
  auto fields = sample.fields;
  std::sort(fields.begin(), fields.end());
  return fields;
}

}  // namespace

std::string tar_member(std::string_view name, std::string_view data, char type, bool pax) {
  std::string text;
  if (name.size() > 100 && pax) {
    const std::string record = pax_record("path", name);
    text = tar_block("pax", record.size(), 'x') + padded(record);
  } else if (name.size() > 100) {
    text = tar_block("././@LongLink", name.size() + 1, 'L') + padded(std::string(name) + '\0');
  }
  return text + tar_block(name, data.size(), type) + padded(data);
}

std::string tar_end() { return std::string(1024, '\0'); }

std::string tar_shard(const std::vector<TestSample>& samples) {
  std::string shard;
  for (const TestSample& sample : samples)
    for (const auto& [name, data] : sample.fields)
      shard += tar_member(sample.key + "." + name, data);
  return shard + tar_end();
}

std::string tfrecord(std::string_view data) {
  const std::string length = le(uint64_t{data.size()});
  return length + le(mask(length)) + std::string(data) + le(mask(data));
}

std::string mds_shard(const std::vector<TestSample>& samples,
                      const std::vector<std::string>& fixed) {
  const std::string config = "{\"any\": 1}";
  std::string table, data;
  const size_t begin = 4 + 4 * (samples.size() + 1) + config.size();
  for (const TestSample& sample : samples) {
    table += le(static_cast<uint32_t>(begin + data.size()));
    for (const auto& [name, bytes] : sorted(sample))
      if (!contains(fixed, name)) data += le(static_cast<uint32_t>(bytes.size()));
    for (const auto& [name, bytes] : sorted(sample)) data += bytes;
  }
  table += le(static_cast<uint32_t>(begin + data.size()));
  return le(static_cast<uint32_t>(samples.size())) + table + config + data;
}

std::string mds_index_json(const std::vector<TestSample>& samples,
                           const std::vector<std::pair<std::string, std::string>>& shards,
                           const std::vector<uint64_t>& counts,
                           const std::vector<std::string>& fixed) {
  std::string names, encodings, sizes, list;
  for (const auto& [name, bytes] : sorted(samples.at(0))) {
    names += fmt::format("{}\"{}\"", names.empty() ? "" : ",", name);
    encodings += fmt::format("{}\"bytes\"", encodings.empty() ? "" : ",");
    sizes += fmt::format("{}{}", sizes.empty() ? "" : ",",
                         contains(fixed, name) ? std::to_string(bytes.size()) : "null");
  }
  for (size_t i = 0; i < shards.size(); ++i) {
    list += fmt::format(
        R"({}{{"column_encodings":[{}],"column_names":[{}],"column_sizes":[{}],"compression":null,)"
        R"("format":"mds","hashes":[],"raw_data":{{"basename":"{}","bytes":{},"hashes":{{}}}},)"
        R"("samples":{},"size_limit":67108864,"version":2,"zip_data":null}})",
        i == 0 ? "" : ",", encodings, names, sizes, shards[i].first, shards[i].second.size(),
        counts[i]);
  }
  return fmt::format(R"({{"shards":[{}],"version":2}})", list);
}

std::string megatron_idx(const std::vector<std::string>& sequences) {
  std::string lengths, places, documents = le(uint64_t{0});
  uint64_t at = 0;
  for (size_t i = 0; i < sequences.size(); ++i) {
    lengths += le(static_cast<int32_t>(sequences[i].size() / 2));
    places += le(at);
    documents += le(uint64_t{i + 1});
    at += sequences[i].size();
  }
  return std::string("MMIDIDX\0\0", 9) + le(uint64_t{1}) + '\x08' + le(uint64_t{sequences.size()}) +
         le(uint64_t{sequences.size() + 1}) + lengths + places + documents;
}

void write_test_file(const std::string& path, std::string_view content) {
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  std::ofstream(path, std::ios::binary)
      .write(content.data(), static_cast<std::streamsize>(content.size()));
}

std::string read_test_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace ptc
