// Files whose text is made when they are opened: status.json, plan.json, plan.svg, most of .ptc/.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "fs/tree/node.h"

namespace ptc {

/// Read-only. Every open has a text of its own, so that a reader never sees two halves of two.
class TextFile : public Node {
 public:
  using Text = std::function<std::string()>;
  /// stat of something with the owner, the times and the readers that the file shall have.
  using Owner = std::function<struct stat()>;

  TextFile(std::string key, Text text, Owner owner)
      : Node(std::move(key)), text_(std::move(text)), owner_(std::move(owner)) {}

  FsResult<struct stat> attributes() override;
  FsResult<Opened> open(const Caller& caller, int flags) override;

 private:
  const Text text_;
  const Owner owner_;
};

/// A handle that reads `text`.
std::unique_ptr<Handle> make_text_handle(std::string text);

}  // namespace ptc
