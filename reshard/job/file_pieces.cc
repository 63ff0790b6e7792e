#include "reshard/job/file_pieces.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <span>

#include "store/base/file.h"
#include "store/base/json.h"
#include "store/tensor/checksum.h"

namespace ptc {
namespace {

constexpr uint64_t kMostOfPiece = 64 << 20;  // whatever is asked for
constexpr size_t kSummedAtOnce = 1 << 20;
constexpr int kTriesOfNode = 2;  // whose file is another at its end than at its beginning

struct PieceThatCame {
  uint64_t file_bytes = 0;
  std::string sum;         // empty: was not asked for
  std::string_view bytes;  // of the answer
};

Result<PieceThatCame> piece_in(std::string_view answer) {
  const size_t line_end = std::min(answer.find('\n'), answer.size());
  PTC_TRY(auto line, parse_json(answer.substr(0, line_end)));
  if (!line.is_object() || line_end == answer.size())
    return make_error(Code::kCorrupt, "the piece of a file is damaged");
  const json::object& object = line.as_object();
  PTC_TRY(auto file_bytes, json_uint(object, "bytes"));
  if (!file_bytes) return make_error(Code::kCorrupt, "the piece of a file is damaged");
  return PieceThatCame{*file_bytes, json_text(object, "sum"), answer.substr(line_end + 1)};
}

Result<FileFacts> facts_of(int fd, uint64_t bytes) {
  Checksum sum;
  std::string some;
  for (uint64_t at = 0; at < bytes; at += some.size()) {
    some.resize(std::min<uint64_t>(kSummedAtOnce, bytes - at));
    PTC_TRY(read_exactly(fd, std::as_writable_bytes(std::span(some)), at));
    sum += checksum_of_run(std::as_bytes(std::span(some)), at);
  }
  return FileFacts{bytes, sum.to_hex()};
}

}  // namespace

FileFacts FileFacts::of(std::string_view content) {
  return {content.size(), checksum_of_run(std::as_bytes(std::span(content)), 0).to_hex()};
}

Result<FileFacts> FileFacts::of_file(const std::string& path) {
  PTC_TRY(auto fd, open_file(AT_FDCWD, path, O_RDONLY));
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return errno_error(errno, path);
  return facts_of(fd.get(), static_cast<uint64_t>(info.st_size));
}

json::value to_json(const FileFacts& facts) { return json::array{facts.bytes, facts.sum}; }

Result<FileFacts> file_facts_from(const json::value& value) {
  const json::array* both = value.if_array();
  boost::system::error_code bad;
  if (both == nullptr || both->size() != 2 || !(*both)[1].is_string())
    return make_error(Code::kCorrupt, "what a file is known by is damaged");
  FileFacts facts{(*both)[0].to_number<uint64_t>(bad), std::string((*both)[1].get_string())};
  if (bad) return make_error(Code::kCorrupt, "what a file is known by is damaged");
  return facts;
}

std::string PieceRequest::to_text() const {
  return json::serialize(json::object{
      {"id", name.id}, {"file", name.file}, {"offset", offset}, {"most", most}, {"sum", sum}});
}

Result<std::string> read_piece(const std::string& path, const PieceRequest& request) {
  PTC_TRY(auto fd, open_file(AT_FDCWD, path, O_RDONLY));
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return errno_error(errno, path);
  const auto bytes = static_cast<uint64_t>(info.st_size);
  if (request.offset > bytes)
    return invalid_argument("{} has {} bytes, and those from {} on are asked for",
                            request.name.file, bytes, request.offset);
  json::object line{{"bytes", bytes}};
  if (request.sum) {
    PTC_TRY(auto facts, facts_of(fd.get(), bytes));
    line["sum"] = facts.sum;
  }
  std::string answer = json::serialize(line) + "\n";
  const size_t begin = answer.size();
  answer.resize(begin + std::min({request.most, kMostOfPiece, bytes - request.offset}));
  PTC_TRY(read_exactly(fd.get(), std::as_writable_bytes(std::span(answer).subspan(begin)),
                       request.offset));
  return answer;
}

Result<std::string> fetch_in_pieces(const AskForPiece& ask, const std::vector<std::string>& nodes,
                                    const NamedFile& name, const PieceOptions& options) {
  std::optional<FileFacts> facts = options.facts;
  std::string content;
  std::optional<Error> silent;  // of a node that may have it
  auto begin_anew = [&] {
    content.clear();
    facts = options.facts;
  };
  auto done = [&] { return facts && content.size() == facts->bytes; };
  for (const std::string& node : nodes) {
    auto passed_over = [&](std::string_view why) {
      silent = make_error(Code::kUnavailable, "node {}: {} of checkpoint {}: {}", node, name.file,
                          name.id, why);
    };
    // Whether what it has is what came of others is asked first.
    bool compared = false;
    for (int tries = 0; tries < kTriesOfNode;) {
      if (options.stop.stop_requested()) return Error(Code::kCancelled, "shutting down");
      Result<std::string> answer =
          ask(node, PieceRequest{name, content.size(), options.piece, !compared}.to_text());
      if (answer.has_error()) {
        if (answer.error().code() == Code::kInvalidArgument) passed_over("it is shorter");
        else if (answer.error().code() != Code::kNotFound)
          silent = make_error(Code::kUnavailable, "{}", answer.error().message());
        break;
      }
      const Result<PieceThatCame> piece = piece_in(answer.value());
      if (piece.has_error()) {
        passed_over(piece.error().message());
        break;
      }
      const FileFacts now{piece.value().file_bytes,
                          compared ? facts->sum : std::string(piece.value().sum)};
      if (facts && now != *facts) {
        if (options.facts) {
          passed_over("it is another file");
          break;
        }
        // Which of two is right is not known here: what is parsed later says so.
        begin_anew();
        compared = false;
        ++tries;
        continue;
      }
      if (now.bytes > options.limit) {
        passed_over(fmt::format("it has {} bytes, more than {}", now.bytes, options.limit));
        break;
      }
      facts = now;
      compared = true;
      const std::string_view bytes = piece.value().bytes;
      const uint64_t left = now.bytes - content.size();
      if (bytes.size() > left || bytes.size() < std::min({options.piece, kMostOfPiece, left})) {
        passed_over("a piece of it has not the bytes that were asked for");
        break;
      }
      content += bytes;
      if (options.progress) options.progress(content.size(), now.bytes);
      if (!done()) continue;
      if (FileFacts::of(content) == *facts) return content;
      passed_over("it changed while it was read");
      begin_anew();
      compared = false;
      ++tries;
    }
  }
  if (silent) return *std::move(silent);
  return make_error(Code::kNotFound, "no node that is there has {}", name.file);
}

}  // namespace ptc
