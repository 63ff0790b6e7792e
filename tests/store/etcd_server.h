// Real etcd for tests: members of a cluster of their own, on free ports, in a temporary directory.
#pragma once

#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "store/base/json.h"
#include "store/meta/etcd_http.h"
#include "store/meta/etcd_meta.h"
#include "temp_dir.h"

namespace ptc {

/// Members 0 … count-1, which serve when the constructor returns and end with this object.
class EtcdServers {
 public:
  /// False: there is no etcd to be tested with, and the test is skipped.
  static bool installed();

  /// `options` go to every member; scheme "https" needs those for TLS, and `tls` to talk to them.
  explicit EtcdServers(int count, std::string scheme = "http",
                       std::vector<std::string> options = {},
                       std::shared_ptr<const TlsSource> tls = nullptr);
  ~EtcdServers();

  std::vector<std::string> endpoints() const;
  /// An HTTP server that is not the one to be asked.
  std::string peer_endpoint() const { return members_[0].peer_url; }
  void start(int member);
  /// What a member that does not run has kept.
  void lose_data(int member);
  /// SIGKILL is waited for.
  void signal(int member, int number);
  /// Until a member answers reads that need a leader.
  void wait_until_serving(int member) const;
  /// The member that leads, asked at `member`; -1: none.
  int leader(int member) const;
  /// Forgets all revisions before the present one.
  void compact() const;
  /// What member 0, or another one, answers to a post to /v3/`method`; nullopt: nothing.
  std::optional<json::object> post(const std::string& method, const json::object& request,
                                   int member = 0, std::string token = "") const;

 private:
  struct Member {
    pid_t pid = -1;
    std::string client_url, peer_url;
  };

  TempDir dir_;
  std::vector<Member> members_;
  std::vector<std::string> options_;
  std::shared_ptr<const TlsSource> tls_;
};

/// One member for all tests of the program that need no more; null: etcd is not installed.
EtcdServers* shared_etcd();

/// Options for a cluster name that no other test uses.
EtcdOptions etcd_options(std::vector<std::string> endpoints);

}  // namespace ptc
