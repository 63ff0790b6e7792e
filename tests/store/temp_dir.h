// A directory of a test.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>

#include <string>

#include "store/base/file.h"

namespace ptc {

/// A directory of its own, gone at the end.
class TempDir {
 public:
  TempDir() { PTC_CHECK(::mkdtemp(path_.data()) != nullptr); }
  TempDir(const TempDir&) = delete;
  ~TempDir() { (void)remove_tree(AT_FDCWD, path_); }
  std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_ = ::testing::TempDir() + "ptc-store-XXXXXX";
};

}  // namespace ptc
