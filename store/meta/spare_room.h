// Room kept back on the file system of a metadata database. When that is full, the database needs a
// few pages more to say so much as that something was removed, or to be opened again after a kill:
// they come from here.
#pragma once

#include <string>

namespace ptc {

/// A file that is there to be given up. Threads: under its owner's lock.
class SpareRoom {
 public:
  explicit SpareRoom(std::string path) : path_(std::move(path)) {}

  /// Takes the room, if it is not taken yet and there is any.
  void take();

  /// Gives it back to the file system. False: there was none.
  bool give_up();

 private:
  std::string path_;
  bool taken_ = false;
};

}  // namespace ptc
