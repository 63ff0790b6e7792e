#include "store/rpc/credentials.h"

#include <fcntl.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <sys/stat.h>

#include <cerrno>

#include "store/base/file.h"

namespace ptc {
namespace {

constexpr size_t kMinSecretBytes = 32, kMaxSecretBytes = 4096;

/// The text of a file that only its owner may read.
Result<std::string> read_private_file(const std::string& path, size_t limit) {
  PTC_TRY(auto fd, open_file(AT_FDCWD, path, O_RDONLY | O_NONBLOCK));
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return errno_error(errno, "fstat of " + path);
  if (!S_ISREG(info.st_mode)) return invalid_argument("{} is not a regular file", path);
  if ((info.st_mode & 077) != 0)
    return invalid_argument("others than its owner may use {} (mode {:o}): chmod 600 it", path,
                            info.st_mode & 07777);
  if (static_cast<uint64_t>(info.st_size) > limit)
    return invalid_argument("{} has {} bytes, more than {}", path, info.st_size, limit);
  std::string text(static_cast<size_t>(info.st_size), '\0');
  PTC_TRY(read_exactly(fd.get(), std::as_writable_bytes(std::span(text)), 0));
  return text;
}

}  // namespace

Result<std::shared_ptr<const Credentials>> Credentials::load(const PeerAuth& auth) {
  auto credentials = std::make_shared<Credentials>();
  credentials->insecure_ = auth.insecure;
  if (!auth.secret_file.empty()) {
    auto text = read_private_file(auth.secret_file, kMaxSecretBytes);
    if (!text) return std::move(text).error().with_context("shared secret");
    std::string& secret = credentials->secret_ = std::move(text).value();
    secret.erase(secret.find_last_not_of(" \t\r\n") + 1);
    if (secret.size() < kMinSecretBytes)
      return invalid_argument("the shared secret in {} has {} bytes, fewer than {}; make one with "
                              "'openssl rand -hex 32'",
                              auth.secret_file, secret.size(), kMinSecretBytes);
  }
  return std::shared_ptr<const Credentials>(std::move(credentials));
}

std::string Credentials::proof(std::string_view text) const {
  if (secret_.empty()) return {};
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned size = 0;
  PTC_CHECK(::HMAC(EVP_sha256(), secret_.data(), static_cast<int>(secret_.size()),
                   reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest,
                   &size) != nullptr);
  return std::string(reinterpret_cast<const char*>(digest), size);
}

}  // namespace ptc
