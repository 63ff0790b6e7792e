#include "store/image/image_store.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
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
    auto bytes = image->host_bytes().value();
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
  void open_again(size_t most_open) {
    store_ = ImageStore::open(path_ + "/images", {.most_open = most_open}).value();
  }
  std::vector<ImageRef> publish_many(size_t count) {
    std::vector<ImageRef> images;
    for (size_t i = 0; i < count; ++i) images.push_back(publish("image " + std::to_string(i)));
    return images;
  }
  static bool is_open(int fd) { return ::fcntl(fd, F_GETFD) >= 0; }
  std::string file(const ImageId& id) const { return path_ + "/images/" + id.text; }

  std::string path_ = testing::TempDir() + "ptc-images-XXXXXX";
  std::unique_ptr<ImageStore> store_;
};

TEST_F(Images, AreMendedWhereTheyLie) {
  const std::string right(10000, 'a');
  ImageRef image = publish(right);
  const auto mapped = image->host_bytes().value();  // from before
  ASSERT_EQ(::chmod(file(image->id()).c_str(), 0600), 0);
  const UniqueFd damage = open_file(AT_FDCWD, file(image->id()), O_RDWR).value();
  ASSERT_EQ(::pwrite(damage.get(), "x", 1, 5000), 1);
  EXPECT_EQ(static_cast<char>(mapped[5000]), 'x');
  struct stat before {
  }, after{};
  ASSERT_EQ(::fstat(image->use_file().value().fd(), &before), 0);
  ImageMender mender = ImageMender::open(*image).value();
  EXPECT_TRUE(is_ok(mender.write(0, std::as_bytes(std::span(right)))));
  EXPECT_TRUE(is_ok(mender.finish()));
  EXPECT_EQ(static_cast<char>(mapped[5000]), 'a');
  ASSERT_EQ(::fstat(image->use_file().value().fd(), &after), 0);
  EXPECT_EQ(after.st_mode, before.st_mode);
  EXPECT_EQ(after.st_ino, before.st_ino);
}

TEST_F(Images, ThatAreCutOrTooLongAreMended) {
  const std::string right = std::string(5000, 'a') + std::string(5000, 'b');
  ImageRef image = publish(right);
  ASSERT_EQ(::chmod(file(image->id()).c_str(), 0600), 0);
  for (const off_t size : {100, 20000}) {
    ASSERT_EQ(::truncate(file(image->id()).c_str(), size), 0);
    EXPECT_FALSE(image->host_bytes().has_value());
    ImageMender mender = ImageMender::open(*image).value();
    EXPECT_TRUE(is_ok(mender.write(0, std::as_bytes(std::span(right)).first(6000))));
    EXPECT_TRUE(is_ok(mender.write(6000, std::as_bytes(std::span(right)).subspan(6000))));
    EXPECT_TRUE(is_ok(mender.finish()));
    EXPECT_EQ(text_of(image), right);
  }
}

TEST_F(Images, CanBeShownBeforeTheyAreWhole) {
  ImageWriter writer = store_->create(10).value();
  const ImageId id = writer.id();
  EXPECT_FALSE(store_->open(id).has_value());
  ImageRef shown = store_->show(writer).value();
  EXPECT_EQ(::fcntl(shown->use_file().value().fd(), F_GETFL) & O_ACCMODE, O_RDONLY);
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
  EXPECT_TRUE(is_ok(store_->confirm(image->id())));
  EXPECT_EQ(files(), std::vector<std::string>{image->id().text});
  EXPECT_EQ(image->bytes(), 10000u);
  EXPECT_EQ(text_of(image), std::string(9995, '\0') + "hello");
  struct stat info {};
  ASSERT_EQ(::fstat(image->use_file().value().fd(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0400u);
  EXPECT_EQ(::fcntl(image->use_file().value().fd(), F_GETFL) & O_ACCMODE, O_RDONLY);
  EXPECT_TRUE(is_ok(store_->sync()));
}

TEST_F(Images, EmptyOnesAreLegal) {
  ImageRef image = publish("");
  EXPECT_EQ(image->bytes(), 0u);
  EXPECT_TRUE(image->host_bytes().value().empty());
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
  EXPECT_TRUE(has_error(held->host_bytes(), Code::kCorrupt, "5 bytes instead of 6"));
}

TEST_F(Images, SayInWhichMemoryTheyAre) {
  ImageWriter writer = store_->create(3).value();
  const MemoryPointer target = writer.map().value();
  EXPECT_EQ(target.memory(), NodeMemory::host());
  EXPECT_EQ(target.host().value(), writer.host_bytes().value().data());
  const ImageRef image = store_->publish(std::move(writer)).value();
  EXPECT_EQ(image->place(), MemoryPlace());
  EXPECT_TRUE(image->has_host_bytes());
  EXPECT_EQ(image->map().value().host().value(), image->host_bytes().value().data());
  EXPECT_EQ(image->host_bytes().value().size(), 3u);
}

TEST_F(Images, WithoutHostBytesTheyAreAnErrorAndNotACrash) {
  const Image on_device(ImageId{"0123456789abcdef"}, {"", NodeMemory::cuda(1)}, 3);
  EXPECT_TRUE(on_device.is_here());
  const Image on_node(ImageId{"0123456789abcdef"}, {"w1"}, 3);
  EXPECT_FALSE(on_node.is_here());
  for (const auto& [image, where] :
       {std::pair(&on_device, "memory of cuda:1"), std::pair(&on_node, "on node w1")}) {
    EXPECT_FALSE(image->has_host_bytes());
    EXPECT_TRUE(has_error(image->map(), Code::kUnavailable, where));
    EXPECT_TRUE(has_error(image->host_bytes(), Code::kUnavailable, where));
    EXPECT_TRUE(has_error(image->use_file(), Code::kUnavailable, where));
    EXPECT_TRUE(has_error(ImageMender::open(*image), Code::kUnavailable, where));
  }
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
  ASSERT_EQ(::fstat(image->use_file().value().fd(), &new_info), 0);
  EXPECT_EQ(old_info.st_ino, new_info.st_ino);
  EXPECT_EQ(old_info.st_mode,
            new_info.st_mode);  // the file is its owner's until the caller says so
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
  EXPECT_TRUE(is_ok(store_->confirm(kept)));
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
  EXPECT_TRUE(is_ok(store_->confirm(id)));
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

// UBSan's check of an object's type makes a pipe, and takes it for damaged where it cannot.
#ifdef __SANITIZE_ADDRESS__
constexpr bool kNeedsDescriptors = true;
#else
constexpr bool kNeedsDescriptors = false;
#endif

/// As many descriptors as are open now may be, and some more.
class DescriptorLimit {
 public:
  explicit DescriptorLimit(rlim_t more) {
    const UniqueFd next(::open("/", O_PATH | O_CLOEXEC));
    ::getrlimit(RLIMIT_NOFILE, &before_);
    rlimit now = before_;
    now.rlim_cur = static_cast<rlim_t>(next.get()) + more;
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &now), 0);
  }
  ~DescriptorLimit() { ::setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_ = {};
};

TEST_F(Images, TakeNoDescriptorAtRestBeyondTheMostOpen) {
  open_again(4);
  const std::vector<ImageRef> images = publish_many(100);
  EXPECT_EQ(store_->open_files(), 0u);
  for (int round = 0; round < 3; ++round) {
    for (size_t i = 0; i < images.size(); ++i) {
      EXPECT_EQ(text_of(images[i]), "image " + std::to_string(i));
      EXPECT_LE(store_->open_files(), 4u);
    }
  }
  EXPECT_EQ(store_->open_files(), 4u);
  std::vector<FileInUse> used;
  for (const ImageRef& image : images) used.push_back(image->use_file().value());
  EXPECT_EQ(store_->open_files(), 100u);
  for (const FileInUse& one : used) EXPECT_TRUE(is_open(one.fd()));
  used.clear();
  EXPECT_EQ(store_->open_files(), 4u);
}

TEST_F(Images, BeingWrittenTakeNoneEither) {
  open_again(4);
  std::vector<ImageWriter> writers;
  for (size_t i = 0; i < 30; ++i) {
    writers.push_back(
        store_->create(10, i % 2 == 0 ? ImageStore::TakeSpace::kNow : ImageStore::TakeSpace::kLater)
            .value());
    EXPECT_LE(store_->open_files(), 4u);
  }
  for (size_t i = 0; i < writers.size(); ++i) {
    const std::string text = "image " + std::to_string(i);
    EXPECT_TRUE(is_ok(writers[i].take_space(0, 10)));
    EXPECT_TRUE(is_ok(writers[i].write(0, std::as_bytes(std::span(text)))));
  }
  const ImageRef shown = store_->show(writers[0]).value();
  std::vector<ImageRef> images;
  for (ImageWriter& writer : writers) images.push_back(store_->publish(std::move(writer)).value());
  EXPECT_EQ(images[0], shown);
  for (size_t i = 0; i < images.size(); ++i)
    EXPECT_EQ(text_of(images[i]).c_str(), "image " + std::to_string(i));
  EXPECT_LE(store_->open_files(), 4u);
}

TEST_F(Images, ThatAreUsedAgainStayOpen) {
  open_again(4);
  const std::vector<ImageRef> images = publish_many(50);
  const int fd = images[0]->use_file().value().fd();
  for (size_t i = 1; i < images.size(); ++i) {
    EXPECT_EQ(images[0]->use_file().value().fd(), fd) << i;
    (void)images[i]->use_file().value();
  }
  std::vector<FileInUse> held;
  for (size_t i = 1; i < images.size(); ++i) held.push_back(images[i]->use_file().value());
  for (const ImageRef& image : images) EXPECT_EQ(text_of(image).substr(0, 6), "image ");
}

TEST_F(Images, AnImageThatGoesTakesItsDescriptorAlong) {
  open_again(4);
  std::vector<ImageRef> images = publish_many(3);
  for (const ImageRef& image : images) (void)text_of(image);
  EXPECT_EQ(store_->open_files(), 3u);
  images.erase(images.begin());
  EXPECT_EQ(store_->open_files(), 2u);
  const ImageRef held = images[0];
  store_.reset();
  EXPECT_EQ(text_of(held), "image 1");
}

TEST_F(Images, ThreadsMayUseMoreThanAreOpen) {
  open_again(3);
  const std::vector<ImageRef> images = publish_many(24);
  std::atomic<bool> wrong{false};
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      unsigned random = t;
      for (int i = 0; i < 4000; ++i) {
        random = random * 1103515245 + 12345;
        const size_t which = random / 65536 % (i % 2 == 0 ? 2 : images.size());
        const std::string text = "image " + std::to_string(which);
        const FileInUse file = images[which]->use_file().value();
        char got[16];
        if (::pread(file.fd(), got, sizeof got, 0) != static_cast<ssize_t>(text.size()) ||
            std::string_view(got, text.size()) != text)
          wrong = true;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(wrong);
  EXPECT_LE(store_->open_files(), 3u);
}

TEST_F(Images, OfWhichTheNameGoesWhileTheyAreUsedByOthers) {
  open_again(2);
  std::vector<ImageRef> images = publish_many(40);
  std::atomic<bool> wrong{false}, stop{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      while (!stop)
        for (size_t i = 0; i < images.size(); ++i)
          if (text_of(images[i]) != "image " + std::to_string(i)) wrong = true;
    });
  }
  for (const ImageRef& image : images) EXPECT_TRUE(is_ok(store_->remove(image->id())));
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(wrong);
  for (size_t i = 0; i < images.size(); ++i)
    EXPECT_EQ(text_of(images[i]), "image " + std::to_string(i));
  EXPECT_EQ(files().size(), 39u);  // one is kept open, as half of those that may be
  for (const std::string& name : files()) EXPECT_TRUE(name.ends_with(".removed")) << name;
  EXPECT_LE(store_->open_files(), 3u);
  images.clear();
  EXPECT_TRUE(files().empty());
  EXPECT_EQ(store_->open_files(), 0u);
}

TEST_F(Images, AreNotReadFromAnotherFileOfTheirName) {
  const std::vector<ImageRef> images = publish_many(3);
  struct statx info {};
  ASSERT_EQ(::statx(AT_FDCWD, file(images[0]->id()).c_str(), 0, STATX_BTIME, &info), 0);
  if ((info.stx_mask & STATX_BTIME) == 0) GTEST_SKIP() << "this file system knows no time of birth";
  const auto replace = [&](const ImageRef& image) {
    ASSERT_TRUE(is_ok(write_file_atomically(AT_FDCWD, path_ + "/other", "image X")));
    ASSERT_EQ(::rename((path_ + "/other").c_str(), file(image->id()).c_str()), 0);
  };
  replace(images[0]);
  EXPECT_TRUE(has_error(images[0]->host_bytes(), Code::kCorrupt, "replaced"));
  ASSERT_EQ(::unlink(file(images[1]->id()).c_str()), 0);
  EXPECT_TRUE(has_error(images[1]->host_bytes(), Code::kCorrupt, "taken away"));
  EXPECT_EQ(text_of(images[2]), "image 2");  // and is open
  replace(images[2]);
  EXPECT_EQ(text_of(images[2]), "image 2");
  for (const ImageRef& image : images) EXPECT_TRUE(is_ok(store_->remove(image->id())));
  EXPECT_TRUE(files().empty());
}

TEST_F(Images, ThatWereRemovedGetNoNameAgain) {
  for (const size_t most_open :
       {0, 4}) {  // it has no name, or one that goes with it; in that order
    SCOPED_TRACE(most_open);
    ASSERT_EQ(::mkdir((path_ + "/some").c_str(), 0700), 0);
    ASSERT_TRUE(is_ok(write_file_atomically(AT_FDCWD, path_ + "/some/a", "held")));
    const auto files = std::make_shared<LazyFiles>(
        open_file(AT_FDCWD, path_ + "/some", O_RDONLY | O_DIRECTORY).value(), "some", most_open);
    std::unique_ptr<LazyFile> file = LazyFile::find(files, "a").value();
    EXPECT_TRUE(is_ok(file->remove()));
    EXPECT_TRUE(has_error(file->rename("b"), Code::kNotFound, "was removed"));
    ASSERT_TRUE(is_ok(write_file_atomically(AT_FDCWD, path_ + "/some/b", "another")));
    char text[4] = {};
    EXPECT_EQ(::pread(file->use().value().fd(), text, sizeof(text), 0), 4);
    EXPECT_EQ(std::string_view(text, 4), "held");
    file.reset();
    EXPECT_EQ(::unlink((path_ + "/some/b").c_str()), 0);
    EXPECT_EQ(::rmdir((path_ + "/some").c_str()), 0);
  }
}

TEST_F(Images, AreTheirOwnersUntilTheyAreConfirmed) {
  ASSERT_TRUE(is_ok(write_file_atomically(AT_FDCWD, path_ + "/own", "written")));
  ASSERT_EQ(::chmod((path_ + "/own").c_str(), 0644), 0);
  const ImageRef image = store_->adopt(AT_FDCWD, path_ + "/own").value();
  const auto mode = [&] {
    struct stat now {};
    EXPECT_EQ(::stat((path_ + "/own").c_str(), &now), 0);
    return now.st_mode & 07777;
  };
  EXPECT_EQ(mode(), 0644u);
  // It cannot be done now.
  ASSERT_EQ(::rename(file(image->id()).c_str(), (path_ + "/away").c_str()), 0);
  ASSERT_EQ(::symlink(file(image->id()).c_str(), file(image->id()).c_str()), 0);
  const Result<> refused = store_->confirm(image->id());
  ASSERT_TRUE(refused.has_error());
  EXPECT_EQ(refused.error().errno_value(), ELOOP) << refused.error().message();
  EXPECT_TRUE(store_->is_draft(image->id()));
  ASSERT_EQ(::rename((path_ + "/away").c_str(), file(image->id()).c_str()), 0);
  EXPECT_TRUE(is_ok(store_->confirm(image->id())));
  EXPECT_EQ(mode(), 0400u);
  EXPECT_EQ(files(), std::vector{image->id().text});
}

TEST_F(Images, AreReadWithTheLastDescriptor) {
  if (kNeedsDescriptors)
    GTEST_SKIP() << "the sanitizer takes descriptors of its own to look at objects";
  const std::vector<ImageRef> images = publish_many(20);
  for (const ImageRef& image : images) EXPECT_TRUE(is_ok(store_->confirm(image->id())));
  const DescriptorLimit limit(2);
  for (size_t i = 0; i < images.size(); ++i)
    EXPECT_EQ(text_of(images[i]), "image " + std::to_string(i));
  EXPECT_EQ(store_->open_files(), 2u);
  std::vector<FileInUse> used;
  for (size_t i = 0; i < 2; ++i) used.push_back(images[i]->use_file().value());
  auto none = images[2]->use_file();
  ASSERT_TRUE(none.has_error());
  EXPECT_EQ(none.error().errno_value(), EMFILE);

  const ImageRef held = images[2];
  EXPECT_TRUE(is_ok(store_->remove(held->id())));
  used.clear();
  EXPECT_EQ(text_of(held), "image 2");
}

TEST_F(Images, RemovedWithoutADescriptorAreKeptUnderAnotherName) {
  if (kNeedsDescriptors)
    GTEST_SKIP() << "the sanitizer takes descriptors of its own to look at objects";
  std::vector<ImageRef> images = publish_many(2);
  for (const ImageRef& image : images) EXPECT_TRUE(is_ok(store_->confirm(image->id())));
  {
    const DescriptorLimit limit(0);
    for (const ImageRef& image : images) EXPECT_TRUE(is_ok(store_->remove(image->id())));
    for (const ImageRef& image : images) EXPECT_TRUE(is_ok(store_->remove(image->id())));
  }
  EXPECT_EQ(files().size(), 2u);
  for (const std::string& name : files()) EXPECT_TRUE(name.ends_with(".removed")) << name;
  EXPECT_TRUE(store_->list().value().empty());
  EXPECT_EQ(text_of(images[0]), "image 0");
  EXPECT_EQ(store_->open(images[0]->id()).value(), images[0]);
  const ImageId gone = images[0]->id();
  images.erase(images.begin());
  EXPECT_TRUE(has_error(store_->open(gone), Code::kNotFound));
  EXPECT_EQ(files().size(), 1u);
  // As after a kill: nobody holds what is left.
  const auto after = ImageStore::open(path_ + "/images").value();
  EXPECT_TRUE(files().empty());
}

}  // namespace
}  // namespace ptc
