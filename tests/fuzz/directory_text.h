// A directory as the text of a fuzz target. Of each file: the length of its name, that, the length
// of what is in it (two bytes, or more: kLong), and that. A name that begins with '!' is of an
// archive as torch.save writes it: the number of its storages, of each the length (two bytes), and
// its pickle; all storages are zeros. What has the name of a file before it is added to that.
#pragma once

#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "fuzz.h"
#include "store/base/file.h"
#include "store/codec/zip.h"

namespace ptc::fuzz {

inline std::string archive_of(std::string_view pickle, const std::vector<uint64_t>& storages) {
  ZipWriter writer;
  writer.add("a/data.pkl", pickle);
  for (size_t i = 0; i < storages.size(); ++i)
    writer.add("a/data/" + std::to_string(i), std::string(storages[i], '\0'));
  const ZipWriter::Layout layout = std::move(writer).finish();
  std::string file(layout.file_bytes, '\0');
  for (const ZipWriter::Piece& piece : layout.pieces)
    file.replace(piece.offset, piece.bytes.size(), piece.bytes);
  return file;
}

template <class Number>
std::string number_text(Number number) {
  return {reinterpret_cast<const char*>(&number), sizeof number};
}
inline std::string file_text(std::string_view name, std::string_view content) {
  return number_text(static_cast<uint8_t>(name.size())) + std::string(name) +
         number_text(static_cast<uint32_t>(content.size())) + std::string(content);
}
inline std::string archive_text(std::string_view name, std::string_view pickle,
                                const std::vector<uint16_t>& storages) {
  std::string content = number_text(static_cast<uint8_t>(storages.size()));
  for (const uint16_t bytes : storages) content += number_text(bytes);
  return file_text("!" + std::string(name), content + std::string(pickle));
}

/// What such a text says, by name. Names that no directory has are others.
class DirectoryText {
 public:
  explicit DirectoryText(std::string_view text) {
    while (!text.empty() && files_.size() < kMostFiles) {
      std::string name(take(text, take_number_of<uint8_t>(text)));
      const std::string_view content = take(text, take_number_of<uint32_t>(text));
      const bool archive = name.starts_with('!');
      if (archive) name.erase(0, 1);
      files_[plain(name)] += archive ? archive_in(content) : std::string(content);
    }
  }
  const std::map<std::string, std::string>& files() const { return files_; }

 private:
  static constexpr size_t kMostFiles = 64, kMostStorages = 64;

  template <class Number>
  static Number take_number_of(std::string_view& text) {
    Number number = 0;
    std::memcpy(&number, text.data(), std::min(sizeof number, text.size()));
    text.remove_prefix(std::min(sizeof number, text.size()));
    return number;
  }
  static std::string_view take(std::string_view& text, size_t bytes) {
    const std::string_view taken = text.substr(0, bytes);
    text.remove_prefix(taken.size());
    return taken;
  }
  static std::string archive_in(std::string_view content) {
    std::vector<uint64_t> storages;
    for (size_t left = take_number_of<uint8_t>(content) % kMostStorages; left > 0; --left)
      storages.push_back(take_number_of<uint16_t>(content));
    return archive_of(content, storages);
  }
  /// Without what leads out of a directory, or would be a directory where a file is.
  static std::string plain(std::string_view name) {
    std::string path;
    for (const char c : name.substr(0, 100)) {
      if (c == '/' && (path.empty() || path.back() == '/')) continue;
      const bool known =
          (c >= '-' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '_';
      path += known ? c : 'x';
    }
    for (size_t at = path.find(".."); at != path.npos; at = path.find("..", at)) path[at] = 'x';
    while (!path.empty() && path.back() == '/') path.pop_back();
    return path.empty() || path == "." ? "x" : path;
  }
  std::map<std::string, std::string> files_;
};

/// A directory in memory, if the machine has such.
class WrittenDirectory {
 public:
  WrittenDirectory() {
    path_ = (std::filesystem::is_directory("/dev/shm") ? "/dev/shm" : "/tmp");
    path_ += "/ptc-fuzz-XXXXXX";
    PTC_CHECK(::mkdtemp(path_.data()) != nullptr);
    fd_ = open_file(AT_FDCWD, path_, O_RDONLY | O_DIRECTORY).value();
  }
  ~WrittenDirectory() { std::filesystem::remove_all(path_); }
  WrittenDirectory(const WrittenDirectory&) = delete;
  WrittenDirectory& operator=(const WrittenDirectory&) = delete;
  int fd() const { return fd_.get(); }

  /// In the place of what was there.
  void write(std::string_view text) {
    for (const auto& entry : std::filesystem::directory_iterator(path_))
      std::filesystem::remove_all(entry.path());
    const DirectoryText directory(text);
    for (const auto& [name, content] : directory.files()) {
      const std::filesystem::path path = path_ + "/" + name;
      std::error_code error;  // a file may be where a directory would have to be
      std::filesystem::create_directories(path.parent_path(), error);
      const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
      if (fd < 0) continue;
      PTC_CHECK(::write(fd, content.data(), content.size()) ==
                static_cast<ssize_t>(content.size()));
      ::close(fd);
    }
  }

 private:
  std::string path_;
  UniqueFd fd_;
};

}  // namespace ptc::fuzz
