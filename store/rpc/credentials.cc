#include "store/rpc/credentials.h"

#include <openssl/evp.h>
#include <openssl/hmac.h>

#include "store/tls/private_file.h"

namespace ptc {
namespace {

constexpr size_t kMinSecretBytes = 32, kMaxSecretBytes = 4096;

}  // namespace

Result<std::shared_ptr<const Credentials>> Credentials::load(const PeerAuth& auth) {
  auto credentials = std::make_shared<Credentials>();
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
  if (!auth.ca_file.empty() || !auth.cert_file.empty() || !auth.key_file.empty()) {
    PTC_TRY(credentials->tls_, TlsSource::open({auth.ca_file, auth.cert_file, auth.key_file}, TlsUse::kMutual));
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
