// What planner commands read: files, pipes, standard input; and what is said where they are no
// text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <string_view>

#include "store/base/error.h"

namespace ptc::planner {

/// "1 GPU", "8 GPUs".
std::string counted(uint64_t count, std::string_view what);

/// Whether other files can lie beside it: no pipe, and no descriptor by its name in /dev or /proc.
bool has_a_place(const std::string& path);

/// "standard input" for "-", else the name itself.
std::string input_name(const std::string& path);

/// All of a file or a pipe, or of standard input for "-". kInvalidArgument: more than `most` bytes.
/// The error names the file.
Result<std::string> read_input(const std::string& path, size_t most);

/// `text` without a byte order mark. kInvalidArgument: it is not UTF-8; which encoding it seems to
/// have instead, and the command that changes it.
Result<std::string_view> as_utf8(std::string_view text, const std::string& name);

/// For "there is no 'word'": " (did you mean 'words'?); there are 'other', 'words' and 3 more",
/// of at most `most` names.
std::string what_there_is(std::string_view word, const std::set<std::string>& known,
                          size_t most = 8);
/// "'a', 'b' and 3 more", of at most `most` names.
std::string some_of(const std::set<std::string>& names, size_t most = 8);

}  // namespace ptc::planner
