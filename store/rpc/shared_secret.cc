#include "store/rpc/shared_secret.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include "store/tls/private_file.h"

namespace ptc {
namespace {

constexpr size_t kMinSecretBytes = 32, kMaxSecretBytes = 4096;

std::string hmac_sha256(const std::string& key, std::string_view text) {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned size = 0;
  PTC_CHECK(::HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
                   reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest,
                   &size) != nullptr);
  return std::string(reinterpret_cast<const char*>(digest), size);
}

}  // namespace

Result<SharedSecret> SharedSecret::read(const std::string& path) {
  auto text = read_private_file(path, kMaxSecretBytes);
  if (!text) return std::move(text).error().with_context("shared secret");
  SharedSecret secret;
  size_t number = 0;
  for (size_t at = 0; at < text.value().size();) {
    const size_t end = std::min(text.value().find('\n', at), text.value().size());
    std::string line = text.value().substr(at, end - at);
    line.erase(line.find_last_not_of(" \t\r") + 1);
    at = end + 1;
    ++number;
    if (line.empty()) continue;
    if (line.size() < kMinSecretBytes)
      return invalid_argument(
          "the shared secret in line {} of {} has {} bytes, fewer than {}; each line is a secret "
          "of its own: "
          "make one with 'openssl rand -hex 32'",
          number, path, line.size(), kMinSecretBytes);
    secret.lines_.push_back(std::move(line));
  }
  if (secret.lines_.empty())
    return invalid_argument("there is no shared secret in {}; make one with 'openssl rand -hex 32'",
                            path);
  return secret;
}

std::string SharedSecret::proof(std::string_view text) const {
  return hmac_sha256(lines_.front(), text);
}

bool SharedSecret::proves(std::string_view proof, std::string_view text) const {
  bool proved = false;
  for (const std::string& line : lines_) {
    const std::string right = hmac_sha256(line, text);
    if (proof.size() == right.size() &&
        CRYPTO_memcmp(proof.data(), right.data(), right.size()) == 0)
      proved = true;
  }
  return proved;
}

}  // namespace ptc
