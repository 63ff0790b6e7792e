// The page that ptcfs --http shows, drawn from the same document as /api/jobs.json. All of it is
// HTML made here; the script only asks for it again and again.
#pragma once

#include <boost/json/object.hpp>
#include <span>
#include <string>
#include <string_view>

namespace ptc {

/// fs/web/: page, script, style, icon.
struct WebFile {
  std::string_view name, text;
};
std::span<const WebFile> web_files();
/// The text of one; it exists.
std::string_view web_file(std::string_view name);

/// `document` is jobs_document(): names in it are users', and are escaped.
std::string web_page(const boost::json::object& document);

/// For text and for attributes in quotes.
std::string html_escaped(std::string_view text);

}  // namespace ptc
