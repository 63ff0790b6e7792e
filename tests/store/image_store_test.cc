#include "store/image/image_store.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "expect_error.h"

namespace ptc {
namespace {

class Images : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NE(::mkdtemp(path_.data()), nullptr);
    store_ = ImageStore::open(path_ + "/images").value();
  }
  void TearDown() override { EXPECT_TRUE(is_ok(remove_tree(AT_FDCWD, path_))); }

  ImageRef publish(std::string_view text) {
    ImageWriter writer = store_->create(text.size()).value();
    EXPECT_TRUE(is_ok(writer.write(0, std::as_bytes(std::span(text)))));
    return store_->publish(std::move(writer)).value();
  }
  static std::string text_of(const ImageRef& image) {
    auto bytes = image->map().value();
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    DIR* dir = ::opendir((path_ + "/images").c_str());
    while (dirent* entry = ::readdir(dir))
      if (entry->d_name[0] != '.') names.push_back(entry->d_name);
    ::closedir(dir);
    std::sort(names.begin(), names.end());
    return names;
  }
  std::string file(const ImageId& id) const { return path_ + "/images/" + id.text; }

  std::string path_ = testing::TempDir() + "ptc-images-XXXXXX";
  std::unique_ptr<ImageStore> store_;
};

TEST_F(Images, AreMendedWhereTheyLie) {
  const std::string right(10000, 'a');
  ImageRef image = publish(right);
  const auto mapped = image->map().value();  // from before
  ASSERT_EQ(::chmod(file(image->id()).c_str(), 0600), 0);
  const UniqueFd damage = open_file(AT_FDCWD, file(image->id()), O_RDWR).value();
  ASSERT_EQ(::pwrite(damage.get(), "x", 1, 5000), 1);
  EXPECT_EQ(static_cast<char>(mapped[5000]), 'x');
  struct stat before {}, after {};
  ASSERT_EQ(::fstat(image->fd(), &before), 0);
  ImageMender mender = ImageMender::open(*image).value();
  EXPECT_TRUE(is_ok(mender.write(0, std::as_bytes(std::span(right)))));
  EXPECT_TRUE(is_ok(mender.finish()));
  EXPECT_EQ(static_cast<char>(mapped[5000]), 'a');
  ASSERT_EQ(::fstat(image->fd(), &after), 0);
  EXPECT_EQ(after.st_mode, before.st_mode);
  EXPECT_EQ(after.st_ino, before.st_ino);
}

TEST_F(Images, ThatAreCutOrTooLongAreMended) {
  const std::string right = std::string(5000, 'a') + std::string(5000, 'b');
  ImageRef image = publish(right);
  ASSERT_EQ(::chmod(file(image->id()).c_str(), 0600), 0);
  for (const off_t size : {100, 20000}) {
    ASSERT_EQ(::truncate(file(image->id()).c_str(), size), 0);
    EXPECT_FALSE(image->map().has_value());
    ImageMender mender = ImageMender::open(*image).value();
    EXPECT_TRUE(is_ok(mender.write(0, std::as_bytes(std::span(right)).first(6000))));
    EXPECT_TRUE(is_ok(mender.write(6000, std::as_bytes(std::span(right)).subspan(6000))));
    EXPECT_TRUE(is_ok(mender.finish()));
    EXPECT_EQ(text_of(image), right);
  }
}

TEST_F(Images, ThatAreWithdrawnAreNotFoundThoughTheyAreHeld) {
  ImageRef image = publish("hello");
  store_->withdraw(image->id());
  EXPECT_TRUE(has_error(store_->open(image->id()), Code::kNotFound, "damaged"));
  EXPECT_EQ(text_of(image), "hello");
}

TEST_F(Images, CanBeShownBeforeTheyAreWhole) {
  ImageWriter writer = store_->create(10).value();
  const ImageId id = writer.id();
  EXPECT_FALSE(store_->open(id).has_value());
  ImageRef shown = store_->show(writer).value();
  EXPECT_EQ(::fcntl(shown->fd(), F_GETFL) & O_ACCMODE, O_RDONLY);
  EXPECT_TRUE(is_ok(writer.write(0, std::as_bytes(std::span("hello", 5)))));
  EXPECT_EQ(text_of(store_->open(id, 10).value()), "hello" + std::string(5, '\0'));
  EXPECT_EQ(store_->publish(std::move(writer)).value(), shown);

  ImageWriter given_up = store_->create(10).value();
  const ImageId gone = given_up.id();
  shown = store_->show(given_up).value();
  { const ImageWriter end = std::move(given_up); }
  shown.reset();
  EXPECT_FALSE(store_->open(gone).has_value());
}

TEST_F(Images, ArePublishedReadOnlyUnderTheirId) {
  ImageWriter writer = store_->create(10000).value();
  EXPECT_EQ(files(), std::vector<std::string>{writer.id().text + ".part"});
  EXPECT_TRUE(is_ok(writer.write(9995, std::as_bytes(std::span("hello", 5)))));
  ImageRef image = store_->publish(std::move(writer)).value();
  EXPECT_EQ(files(), (std::vector<std::string>{image->id().text, image->id().text + ".draft"}));
  store_->confirm(image->id());
  EXPECT_EQ(files(), std::vector<std::string>{image->id().text});
  EXPECT_EQ(image->bytes(), 10000u);
  EXPECT_EQ(text_of(image), std::string(9995, '\0') + "hello");
  struct stat info {};
  ASSERT_EQ(::fstat(image->fd(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0400u);
  EXPECT_EQ(::fcntl(image->fd(), F_GETFL) & O_ACCMODE, O_RDONLY);
  EXPECT_TRUE(is_ok(store_->sync()));
}

TEST_F(Images, EmptyOnesAreLegal) {
  ImageRef image = publish("");
  EXPECT_EQ(image->bytes(), 0u);
  EXPECT_TRUE(image->map().value().empty());
}

TEST_F(Images, UnpublishedOnesGo) {
  { ImageWriter writer = store_->create(100).value(); }
  EXPECT_TRUE(files().empty());
}

TEST_F(Images, AreOneObjectWhileHeldAndKeepTheirBytesAfterRemoval) {
  ImageRef image = publish("abc");
  ImageId id = image->id();
  EXPECT_EQ(store_->open(id, 3).value(), image);
  EXPECT_TRUE(is_ok(store_->remove(id)));
  EXPECT_TRUE(is_ok(store_->remove(id)));
  EXPECT_EQ(text_of(image), "abc");
  EXPECT_EQ(store_->open(id, 3).value(), image);
  EXPECT_TRUE(files().empty());
  image.reset();
  EXPECT_TRUE(has_error(store_->open(id, 3), Code::kNotFound));
}

TEST_F(Images, SurviveANewStoreObject) {
  ImageId id = publish("abc")->id();
  store_ = ImageStore::open(path_ + "/images").value();
  EXPECT_EQ(text_of(store_->open(id, 3).value()), "abc");
}

TEST_F(Images, CutFilesAreCorruptAndNotABusError) {
  ImageRef held = publish("abcdef");
  ImageId id = publish("abcdef")->id();
  EXPECT_TRUE(has_error(store_->open(id, 7), Code::kCorrupt, "6 bytes instead of 7"));
  for (const ImageId& cut : {id, held->id()}) {
    ASSERT_EQ(::chmod(file(cut).c_str(), 0600), 0);
    ASSERT_EQ(::truncate(file(cut).c_str(), 5), 0);
  }
  EXPECT_TRUE(has_error(store_->open(id, 6), Code::kCorrupt, "5 bytes instead of 6"));
  EXPECT_TRUE(has_error(held->map(), Code::kCorrupt, "5 bytes instead of 6"));
}

TEST_F(Images, BadIdsLeadNowhere) {
  for (const char* id :
       {"", "..", "../x", "0123456789abcde", "0123456789ABCDEF", "0123456789abcdef0"}) {
    EXPECT_TRUE(has_error(store_->open({id}, 0), Code::kInvalidArgument)) << id;
    EXPECT_TRUE(has_error(store_->remove({id}), Code::kInvalidArgument)) << id;
  }
  EXPECT_TRUE(has_error(store_->open({"0123456789abcdef"}, 0), Code::kNotFound));
  ASSERT_EQ(::symlink("/etc/passwd", file({"0123456789abcdef"}).c_str()), 0);
  EXPECT_FALSE(store_->open({"0123456789abcdef"}, 0));
}

TEST_F(Images, AFullFileSystemIsSaidBeforehand) {
  uint64_t free_bytes = store_->space().value().free_bytes;
  EXPECT_TRUE(has_error(store_->create(free_bytes), Code::kNoSpace, "free in " + path_));
  EXPECT_TRUE(has_error(store_->create(UINT64_MAX), Code::kNoSpace));
  EXPECT_TRUE(files().empty());
}

TEST_F(Images, SpaceIsReservedWhenAnImageIsMade) {
  ImageWriter writer = store_->create(1 << 20).value();
  struct stat info {};
  ASSERT_EQ(::stat((file(writer.id()) + ".part").c_str(), &info), 0);
  EXPECT_GE(info.st_blocks * 512, 1 << 20);
}

TEST_F(Images, AreAdoptedWithoutACopy) {
  UniqueFd dir = open_file(AT_FDCWD, path_, O_RDONLY | O_DIRECTORY).value();
  ASSERT_TRUE(is_ok(write_file_atomically(dir.get(), "upload", "abc")));
  ImageRef image = store_->adopt(dir.get(), "upload").value();
  EXPECT_EQ(text_of(image), "abc");
  struct stat old_info {
  }, new_info{};
  ASSERT_EQ(::fstatat(dir.get(), "upload", &old_info, 0), 0);
  ASSERT_EQ(::fstat(image->fd(), &new_info), 0);
  EXPECT_EQ(old_info.st_ino, new_info.st_ino);
  EXPECT_EQ(old_info.st_mode, new_info.st_mode);  // the file is its owner's until the caller says so
  EXPECT_EQ(store_->open(image->id(), 3).value(), image);
}

TEST_F(Images, HolesOfAnAdoptedFileAreFilled) {
  const std::string upload = path_ + "/upload";
  UniqueFd fd = open_file(AT_FDCWD, upload, O_RDWR | O_CREAT | O_EXCL).value();
  ASSERT_EQ(::ftruncate(fd.get(), 1 << 20), 0);
  struct stat before {
  }, after{};
  ASSERT_EQ(::fstat(fd.get(), &before), 0);
  ASSERT_LT(before.st_blocks * 512, 1 << 20);
  ImageRef image = store_->adopt(AT_FDCWD, upload).value();
  ASSERT_EQ(::fstat(fd.get(), &after), 0);
  EXPECT_GE(after.st_blocks * 512, 1 << 20);
  EXPECT_EQ(after.st_mtim.tv_sec, before.st_mtim.tv_sec);
  EXPECT_EQ(after.st_mtim.tv_nsec, before.st_mtim.tv_nsec);
  EXPECT_EQ(text_of(image), std::string(1 << 20, '\0'));
}

TEST_F(Images, OnlyRegularFilesAreAdopted) {
  UniqueFd dir = open_file(AT_FDCWD, path_, O_RDONLY | O_DIRECTORY).value();
  ASSERT_EQ(::symlinkat("/etc/passwd", dir.get(), "link"), 0);
  ASSERT_EQ(::mkfifoat(dir.get(), "fifo", 0600), 0);
  for (const char* name : {"link", "fifo", "images", "none"})
    EXPECT_FALSE(store_->adopt(dir.get(), name)) << name;
  EXPECT_TRUE(files().empty());
}

TEST_F(Images, OfAnotherFileSystemAreNotAdopted) {
  struct stat here {
  }, there{};
  ASSERT_EQ(::stat(path_.c_str(), &here), 0);
  if (::stat("/dev/shm", &there) != 0 || here.st_dev == there.st_dev)
    GTEST_SKIP() << "needs a second file system at /dev/shm";
  std::string path = "/dev/shm/ptc-adopt-" + std::to_string(::getpid());
  ASSERT_TRUE(is_ok(write_file_atomically(AT_FDCWD, path, "abc")));
  EXPECT_TRUE(
      has_error(store_->adopt(AT_FDCWD, path), Code::kInvalidArgument, "another file system"));
  ::unlink(path.c_str());
}

TEST_F(Images, WhatIsNotWholeGoesAtStartAndDraftsAreKnown) {
  ImageId kept = publish("a")->id(), draft = publish("b")->id();
  store_->confirm(kept);
  for (const char* name : {"0123456789abcdef.part", "notes.txt"})
    ASSERT_TRUE(is_ok(write_file_atomically(AT_FDCWD, path_ + "/images/" + name, "x")));
  store_ = ImageStore::open(path_ + "/images").value();
  std::vector<std::string> expected = {kept.text, draft.text, draft.text + ".draft", "notes.txt"};
  std::sort(expected.begin(), expected.end());
  EXPECT_EQ(files(), expected);
  EXPECT_EQ(store_->drafts(), std::vector{draft});
  EXPECT_EQ(store_->list().value().size(), 2u);
  EXPECT_TRUE(is_ok(store_->remove(draft)));
  EXPECT_TRUE(store_->drafts().empty());
  EXPECT_EQ(files(), (std::vector<std::string>{kept.text, "notes.txt"}));
}

TEST_F(Images, ThreadsMayOpenMapAndPublishAtOnce) {
  ImageId id = publish("shared")->id();
  store_->confirm(id);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 50; ++i) {
        EXPECT_EQ(text_of(store_->open(id, 6).value()), "shared");
        ImageRef own = publish(std::to_string(t));
        EXPECT_EQ(text_of(own), std::to_string(t));
        EXPECT_TRUE(is_ok(store_->remove(own->id())));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(files(), std::vector<std::string>{id.text});
}

}  // namespace
}  // namespace ptc
