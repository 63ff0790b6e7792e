// What goes on when one process takes over a mount from another, played by two tables over one
// state.
#include "fs/tree/live_state.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "fs/kernel/once_only.h"
#include "fs/tree/node_table.h"
#include "fs/tree/open_files.h"
#include "fs/tree/whiteouts.h"
#include "store/base/file.h"

namespace ptc {
namespace {

constexpr uint64_t kResent = uint64_t{1} << 63;

/// What outlives a process: path → number of the file.
using Disk = std::map<std::string, uint64_t>;

struct DiskHandle : Handle {
  explicit DiskHandle(bool reopens) : reopens_(reopens) {}
  bool can_reopen() const override { return reopens_; }
  FsResult<size_t> read(std::span<std::byte> out, uint64_t, const Interrupted&) override {
    return out.size();
  }
  const bool reopens_;
};

struct DiskNode : Node {
  DiskNode(NodeTable& table, Disk& disk, std::string path, uint64_t number)
      : Node("n" + std::to_string(number)), table_(table), disk_(disk), path_(std::move(path)) {}
  FsResult<struct stat> attributes() override { return (struct stat){}; }
  InodeMode* inode_mode() override { return &mode_; }
  FsResult<Opened> open(const Caller&, int) override {
    ++opens;
    return Opened{std::make_unique<DiskHandle>(true), IoMode::kCached, 0};
  }
  FsResult<NodeRef> lookup(const std::string& name) override {
    const std::string path = path_ + "/" + name;
    const auto found = disk_.find(path);
    if (found == disk_.end()) return Errno{ENOENT};
    return table_.intern(std::make_shared<DiskNode>(table_, disk_, path, found->second));
  }
  FsResult<> unlink(const std::string& name) override {
    if (disk_.erase(path_ + "/" + name) == 0) return Errno{ENOENT};
    return ok();
  }
  int opens = 0;
  NodeTable& table_;
  Disk& disk_;
  const std::string path_;
  InodeMode mode_;
};

/// One process after another.
class Taken {
 public:
  Taken() : fd_(::memfd_create("state", MFD_CLOEXEC)) { start(); }
  /// It is killed: nothing of it is closed or forgotten.
  void kill() {
    for (auto* held : {&files_}) (void)new std::shared_ptr(std::move(*held));
    (void)new std::shared_ptr(std::move(table_));
    (void)new std::shared_ptr(std::move(state_));
    start();
  }
  void start() {
    auto opened = LiveState::open(fd_.get());
    ASSERT_TRUE(opened) << opened.error().message();
    state_ = std::move(opened).value();
    state_->header().mounted = 1;
    table_ = std::make_shared<NodeTable>();
    files_ = std::make_shared<OpenFiles>();
    table_->keep_in(*state_,
                    [files = files_.get()](uint64_t id, Node& node) { files->found(id, node); });
    files_->keep_in(*state_, *table_, passthrough_);
    root_ = table_->intern(std::make_shared<DiskNode>(*table_, disk_, "", 0));
    table_->remember_root(root_);
  }
  NodeRef look(const NodeRef& directory, const std::string& name) {
    auto found = directory->lookup(name);
    return found ? found.value() : nullptr;
  }
  uint64_t tell(const NodeRef& directory, const std::string& name) {
    const NodeRef node = look(directory, name);
    return node == nullptr ? 0 : table_->remember(node, *directory, name);
  }

  UniqueFd fd_;
  Disk disk_;
  Passthrough passthrough_;
  std::shared_ptr<LiveState> state_;
  std::shared_ptr<NodeTable> table_;
  std::shared_ptr<OpenFiles> files_;
  NodeRef root_;
};

TEST(LiveState, ANodeHasItsIdInTheNextProcess) {
  Taken mount;
  mount.disk_ = {{"/a", 1}, {"/a/b", 2}, {"/a/b/" + std::string(255, 'x'), 3}, {"/c", 4}};
  const uint64_t a = mount.tell(mount.root_, "a");
  const uint64_t b = mount.tell(mount.table_->at(a), "b");
  const uint64_t x = mount.tell(mount.table_->at(b), std::string(255, 'x'));
  for (int again = 0; again < 3; ++again) {
    mount.kill();
    EXPECT_EQ(mount.table_->not_found_yet().size(), 3u);
    const NodeRef found = mount.table_->at(x);
    ASSERT_NE(found, nullptr);
    EXPECT_EQ(found->key(), "n3");
    EXPECT_EQ(found->id(), x);
    EXPECT_EQ(mount.table_->at(b)->key(), "n2");
    EXPECT_EQ(mount.table_->not_found_yet().size(), 0u);
    EXPECT_EQ(mount.tell(mount.root_, "a"), a);  // also to whom the name is told again
  }
  const uint64_t c = mount.tell(mount.root_, "c");
  EXPECT_EQ(std::set({a, b, x, c}).size(), 4u);
}

TEST(LiveState, WhoIsToldFirstByNameHasTheFormerId) {
  Taken mount;
  mount.disk_ = {{"/a", 1}, {"/b", 1}};  // a link
  const uint64_t id = mount.tell(mount.root_, "a");
  mount.kill();
  EXPECT_EQ(mount.tell(mount.root_, "b"), id);
  EXPECT_EQ(mount.table_->at(id)->key(), "n1");
}

TEST(LiveState, AnotherFileOfTheSameNameIsNotTheOne) {
  Taken mount;
  mount.disk_ = {{"/a", 1}};
  const uint64_t id = mount.tell(mount.root_, "a");
  mount.kill();
  mount.disk_ = {{"/a", 2}};
  EXPECT_EQ(mount.table_->at(id), nullptr);
  const uint64_t other = mount.tell(mount.root_, "a");
  EXPECT_NE(other, id);
  EXPECT_EQ(mount.table_->at(id), nullptr);
}

TEST(LiveState, AMovedNodeIsFoundWhereItIs) {
  Taken mount;
  mount.disk_ = {{"/a", 1}, {"/d", 2}};
  const uint64_t id = mount.tell(mount.root_, "a"), d = mount.tell(mount.root_, "d");
  mount.disk_ = {{"/d", 2}, {"/d/" + std::string(200, 'y'), 1}};
  mount.table_->moved(*mount.table_->at(id), *mount.table_->at(d), std::string(200, 'y'));
  mount.kill();
  ASSERT_NE(mount.table_->at(id), nullptr);
  EXPECT_EQ(mount.table_->at(id)->key(), "n1");
}

TEST(LiveState, WhatIsForgottenIsGone) {
  Taken mount;
  mount.disk_ = {{"/a", 1}, {"/b", 2}};
  const uint64_t a = mount.tell(mount.root_, "a"), b = mount.tell(mount.root_, "b");
  mount.tell(mount.root_, "b");
  mount.table_->forget(a, 1);
  mount.table_->forget(b, 1);
  mount.kill();
  EXPECT_EQ(mount.table_->at(a), nullptr);
  mount.table_->forget(b, 1);  // before anybody has looked for it
  EXPECT_EQ(mount.table_->at(b), nullptr);
  EXPECT_EQ(mount.table_->not_found_yet().size(), 0u);
  mount.kill();
  EXPECT_EQ(mount.table_->not_found_yet().size(), 0u);
}

TEST(LiveState, NoIdIsGivenTwiceWhateverHappens) {
  Taken mount;
  std::mt19937 random(7);
  std::map<uint64_t, uint64_t> given;  // id → file
  std::map<uint64_t, std::pair<std::string, uint64_t>> known;
  uint64_t next = 1;
  for (int step = 0; step < 3000; ++step) {
    const unsigned what = random() % 20;
    if (what == 0) mount.kill();
    if (what < 8) {
      const std::string name(1 + random() % 200, static_cast<char>('a' + random() % 26));
      if (mount.disk_.emplace("/" + name, next).second) ++next;
      const uint64_t id = mount.tell(mount.root_, name), file = mount.disk_["/" + name];
      const auto [place, is_new] = given.emplace(id, file);
      ASSERT_TRUE(is_new || place->second == file) << id;
      auto& [path, lookups] = known[id];
      path = "/" + name;
      ++lookups;
    } else if (!known.empty()) {
      auto some = known.begin();
      std::advance(some, random() % known.size());
      if (what < 12) {
        mount.table_->forget(some->first, some->second.second);
        known.erase(some);
      } else if (what < 14) {
        mount.disk_.erase(some->second.first);  // and its id stands for nothing else
      } else {
        const NodeRef node = mount.table_->at(some->first);
        if (node != nullptr) {
          ASSERT_EQ(node->key(), "n" + std::to_string(given[some->first]));
        }
      }
    }
  }
}

OpenFile file_of(uint64_t node, bool reopens, uint64_t request) {
  return {.handle = std::make_shared<DiskHandle>(reopens),
          .node = node,
          .flags = O_RDONLY,
          .mode = IoMode::kCached,
          .backing_id = 0,
          .caller = {},
          .request = request};
}

TEST(LiveState, AnOpenFileGoesOn) {
  Taken mount;
  mount.disk_ = {{"/a", 1}, {"/b", 2}};
  const uint64_t a = mount.tell(mount.root_, "a"), b = mount.tell(mount.root_, "b");
  const uint64_t first = mount.files_->add(file_of(a, true, 2)),
                 draft = mount.files_->add(file_of(b, false, 4)),
                 gone = mount.files_->add(file_of(b, true, 6));
  mount.kill();
  mount.disk_.erase("/b");
  std::byte out[4];
  EXPECT_EQ(mount.files_->at(first)->read(out, 0, {}).value(), 4u);
  EXPECT_EQ(mount.files_->at(first), mount.files_->at(first));
  EXPECT_EQ(mount.files_->at(draft)->read(out, 0, {}).error().value, EIO);
  EXPECT_EQ(mount.files_->at(draft)->flush().error().value, EIO);
  EXPECT_EQ(mount.files_->at(gone)->read(out, 0, {}).error().value, ESTALE);
  EXPECT_GT(mount.files_->add(file_of(a, true, 8)), gone);
  EXPECT_EQ(mount.files_->take(gone).node, b);
  EXPECT_EQ(mount.files_->take(gone).node, 0u);
  EXPECT_EQ(mount.files_->take(first).node, a);
  mount.kill();
  EXPECT_EQ(mount.files_->at(first), nullptr);
  EXPECT_EQ(mount.files_->at(gone), nullptr);
  EXPECT_NE(mount.files_->at(draft), nullptr);
}

TEST(LiveState, AnOpenThatNobodyWasToldOfIsDropped) {
  Taken mount;
  mount.disk_ = {{"/a", 1}};
  const uint64_t a = mount.tell(mount.root_, "a");
  const uint64_t told = mount.files_->add(file_of(a, true, 2)),
                 untold = mount.files_->add(file_of(a, true, 4));
  mount.kill();
  mount.files_->drop_unanswered(4);
  EXPECT_EQ(mount.files_->at(untold), nullptr);
  EXPECT_NE(mount.files_->at(told), nullptr);
}

TEST(LiveState, WhileItIsOpenAFileIsReadInOneWay) {
  Taken mount;
  mount.disk_ = {{"/a", 1}};
  const uint64_t a = mount.tell(mount.root_, "a");
  OpenFile by_kernel = file_of(a, true, 2);
  by_kernel.backing_id = 77;
  const uint64_t number = mount.files_->add(std::move(by_kernel));
  mount.kill();
  InodeMode* mode = mount.table_->at(a)->inode_mode();
  EXPECT_EQ(mode->enter(mount.passthrough_, -1), 77);  // whatever the next would have
  mode->leave(mount.passthrough_);
  mount.files_->take(number);
  EXPECT_EQ(mode->enter(mount.passthrough_, -1), 0);
}

TEST(LiveState, WhatWasDoneIsNotDoneAgain) {
  Taken mount;
  mount.disk_ = {{"/a", 1}, {"/b", 2}};
  {
    auto* begun = new OnceOnly(mount.state_.get(), *mount.table_, 10, *mount.root_, "a");
    EXPECT_FALSE(begun->is_done());
    ASSERT_TRUE(mount.root_->unlink("a"));
    new OnceOnly(mount.state_.get(), *mount.table_, 12, *mount.root_, "b");
    new OnceOnly(mount.state_.get(), *mount.table_, 14, *mount.root_, "c");
  }
  for (int again = 0; again < 2; ++again) {
    mount.kill();
    auto* gone = new OnceOnly(mount.state_.get(), *mount.table_, 10 | kResent, *mount.root_, "a");
    EXPECT_TRUE(gone->is_done());
    auto* there = new OnceOnly(mount.state_.get(), *mount.table_, 12 | kResent, *mount.root_, "b");
    EXPECT_FALSE(there->is_done());
    mount.disk_["/c"] = 3;
    auto* made = new OnceOnly(mount.state_.get(), *mount.table_, 14 | kResent, *mount.root_, "c");
    EXPECT_TRUE(made->was_made());
    EXPECT_FALSE(made->is_done());
  }
  mount.kill();
  // One that is asked for the first time, of a name that is gone.
  const OnceOnly other(mount.state_.get(), *mount.table_, 16 | kResent, *mount.root_, "a");
  EXPECT_FALSE(other.is_done());
  EXPECT_FALSE(other.was_made());
}

TEST(LiveState, ARequestThatDaemonsDieOfIsKnown) {
  Taken mount;
  auto crash = [&](LiveState::End how) {
    auto* serving = new LiveState::Serving(mount.state_.get());
    serving->begin(100 | kResent);
    auto* other = new LiveState::Serving(mount.state_.get());
    other->begin(102);
    other->end();
    mount.kill();
    mount.state_->note_end(how);
  };
  crash(LiveState::End::kCrashed);
  for (int i = 0; i < 9; ++i) crash(LiveState::End::kMadeRoom);
  EXPECT_FALSE(mount.state_->is_poison(100 | kResent));
  crash(LiveState::End::kCrashed);
  EXPECT_TRUE(mount.state_->is_poison(100 | kResent));
  EXPECT_FALSE(mount.state_->is_poison(100));  // not one that is asked for once
  EXPECT_FALSE(mount.state_->is_poison(102 | kResent));
}

TEST(LiveState, HiddenNamesStayHiddenUntilTheyComeBack) {
  Taken mount;
  auto* hidden = new Whiteouts;
  hidden->keep_in(mount.state_.get(), "job");
  hidden->hide("one");
  hidden->hide("two");
  hidden->show("two");
  mount.kill();
  Whiteouts again;
  again.keep_in(mount.state_.get(), "job");
  EXPECT_TRUE(again.hidden("one"));
  EXPECT_FALSE(again.hidden("two"));
  Whiteouts other;
  other.keep_in(mount.state_.get(), "other");
  EXPECT_FALSE(other.any());
}

TEST(LiveState, AnotherVersionIsRefused) {
  const UniqueFd fd(::memfd_create("state", MFD_CLOEXEC));
  ASSERT_TRUE(LiveState::open(fd.get()));
  ASSERT_TRUE(LiveState::open(fd.get()));
  const uint32_t version = LiveState::kVersion + 1;
  ASSERT_EQ(::pwrite(fd.get(), &version, sizeof version, offsetof(LiveState::Header, version)),
            static_cast<ssize_t>(sizeof version));
  const auto refused = LiveState::open(fd.get());
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace ptc
