// New images of what lies here; what comes from other nodes: cluster_test and store/transport_test.
#include "reshard/exec/fetch_images.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/store/expect_error.h"

namespace ptc {
namespace {

constexpr uint64_t kMiB = 1 << 20;

class FetchImages : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NE(::mkdtemp(path_.data()), nullptr);
    store_ = ImageStore::open(path_).value();
  }
  void TearDown() override { EXPECT_TRUE(is_ok(remove_tree(AT_FDCWD, path_))); }

  std::string path_ = testing::TempDir() + "ptc-fetch-XXXXXX";
  std::unique_ptr<ImageStore> store_;
};

/// An array of 1 MiB of one byte each.
ArraySlot array(uint32_t tensor, uint64_t byte_offset) {
  const Box box = {{0}, {kMiB}};
  return {tensor, byte_offset, {box.extent, {{box, Dims(1)}}}};
}

Transfer whole_array(uint64_t source_offset, uint64_t target_offset) {
  Transfer transfer;
  transfer.copy.source_offset = source_offset;
  transfer.copy.target_offset = target_offset;
  transfer.copy.run_bytes = kMiB;
  return transfer;
}

TEST_F(FetchImages, NoneIsMadeInADevicesMemory) {
  ImageLayout layout;
  layout.arrays = {array(0, 0)};
  layout.bytes = kMiB;
  layout.memory = NodeMemory::cuda(2);
  const std::vector<TensorFacts> facts(1, {DType::kU8, {kMiB}, {}});
  Executor executor(1, make_loopback_transport());
  ChecksumLedger ledger;
  std::atomic<uint64_t> bytes_done = 0;
  EXPECT_TRUE(has_error(fetch_images(*store_, executor, {{0, &layout, {}}}, {{}, {}, nullptr},
                                     facts, ledger, bytes_done, {}),
                        Code::kInvalidArgument, "cuda:2"));
  const GatherProgram program("", kMiB, {}, {});
  EXPECT_TRUE(
      has_error(executor.materialise(*store_, {{&layout, &program}}, facts, ledger, bytes_done, {}),
                Code::kInvalidArgument, "cuda:2"));
  EXPECT_TRUE(store_->list().value().empty());
}

TEST_F(FetchImages, ASourceInADevicesMemoryIsTheTransportsToRead) {
  const Image source(ImageId{"0123456789abcdef"}, {"", NodeMemory::cuda(2)}, kMiB);
  const ImageRef held(&source, [](const Image*) {});
  Executor executor(1, make_loopback_transport());
  const GatherProgram program("", kMiB, {whole_array(0, 0)}, {held});
  std::vector<std::byte> buffer(kMiB);
  std::vector<std::span<const std::byte>> pieces;
  EXPECT_TRUE(has_error(program.read_in_place(executor.transport(), 0, buffer, pieces),
                        Code::kUnavailable, "cuda:2"));
  ImageLayout layout;
  layout.arrays = {array(0, 0)};
  layout.bytes = kMiB;
  const std::vector<TensorFacts> facts(1, {DType::kU8, {kMiB}, {}});
  ChecksumLedger ledger;
  EXPECT_TRUE(has_error(executor.hash_images({{&layout, &source}}, facts, ledger, {}),
                        Code::kUnavailable, "cuda:2"));
}

TEST_F(FetchImages, PaddingHasSpaceTooAndIsZero) {
  std::string held(2 * kMiB, 'a');
  for (size_t i = 0; i < held.size(); ++i) held[i] = static_cast<char>(i * 7 >> 3 | 1);
  ImageWriter writer = store_->create(held.size()).value();
  ASSERT_TRUE(is_ok(writer.write(0, std::as_bytes(std::span(held)))));
  const ImageRef source = store_->publish(std::move(writer)).value();

  ImageLayout layout;
  layout.literals = std::string(16, 'h');
  layout.arrays = {array(0, kMiB), array(1, 3 * kMiB + 5)};  // padding before, between and behind
  layout.bytes = 6 * kMiB + 1;
  const SharedVector<Transfer> transfers = {whole_array(kMiB, 3 * kMiB + 5), whole_array(0, kMiB)};
  const std::vector<TensorFacts> facts(2, {DType::kU8, {kMiB}, {}});
  Executor executor(2, make_loopback_transport());
  ChecksumLedger ledger;
  std::atomic<uint64_t> bytes_done = 0;
  const auto made = fetch_images(*store_, executor, {{0, &layout, transfers}},
                                 {{source}, {}, nullptr}, facts, ledger, bytes_done, {});
  ASSERT_TRUE(is_ok(made));

  std::string wanted(layout.bytes, '\0');
  wanted.replace(0, 16, std::string(16, 'h'));
  wanted.replace(kMiB, kMiB, held, 0, kMiB);
  wanted.replace(3 * kMiB + 5, kMiB, held, kMiB, kMiB);
  const auto bytes = made.value().front()->host_bytes().value();
  EXPECT_TRUE(std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size()) ==
              wanted);
  EXPECT_EQ(bytes_done, 2 * kMiB);
  for (uint32_t tensor = 0; tensor < 2; ++tensor) {
    EXPECT_EQ(ledger.total(tensor),
              checksum_of_run(std::as_bytes(std::span(held)).subspan(tensor * kMiB, kMiB), 0));
  }
  struct stat info {};
  ASSERT_EQ(::fstat(made.value().front()->use_file().value().fd(), &info), 0);
  EXPECT_GE(static_cast<uint64_t>(info.st_blocks) * 512, layout.bytes)
      << "holes: a full store would show as SIGBUS";
}

TEST_F(FetchImages, WhatATargetHasTwiceIsCopiedWithinItOnceItIsThere) {
  std::string held(kMiB, 'a');
  for (size_t i = 0; i < held.size(); ++i) held[i] = static_cast<char>(i * 5 >> 2 | 1);
  ImageWriter writer = store_->create(held.size()).value();
  ASSERT_TRUE(is_ok(writer.write(0, std::as_bytes(std::span(held)))));
  const ImageRef source = store_->publish(std::move(writer)).value();
  ImageLayout layout;
  layout.arrays = {array(0, 0), array(0, kMiB)};
  layout.bytes = 2 * kMiB;
  constexpr uint32_t kNumber = 3;  // of the target
  Transfer again = whole_array(0, kMiB);
  again.source_image = 1 + kNumber;
  const std::vector<TensorFacts> facts(1, {DType::kU8, {kMiB}, {}});
  Executor executor(2, make_loopback_transport());
  ChecksumLedger ledger;
  std::atomic<uint64_t> bytes_done = 0;
  const auto made =
      fetch_images(*store_, executor, {{kNumber, &layout, {whole_array(0, 0), again}}},
                   {{source}, {}, nullptr}, facts, ledger, bytes_done, {});
  ASSERT_TRUE(is_ok(made));
  const auto bytes = made.value().front()->host_bytes().value();
  EXPECT_TRUE(std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size()) ==
              held + held);
  EXPECT_EQ(ledger.total(0), checksum_of_run(std::as_bytes(std::span(held)), 0));
}

}  // namespace
}  // namespace ptc
