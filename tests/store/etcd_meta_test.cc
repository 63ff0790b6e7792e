// MetaClient over one real etcd.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>

#include "etcd_server.h"
#include "meta_conformance.h"
#include "store/meta/etcd_meta.h"

namespace ptc {
namespace {

/// The server of all tests here; each has a cluster's name of its own. Null: etcd is not installed.
EtcdServers* server() {
  static std::unique_ptr<EtcdServers> one =
      EtcdServers::installed() ? std::make_unique<EtcdServers>(1) : nullptr;
  return one.get();
}

EtcdOptions options() {
  static std::atomic<int> used = 0;
  return {.endpoints = server()->endpoints(), .cluster = fmt::format("test-{}", ++used)};
}

INSTANTIATE_TEST_SUITE_P(
    Etcd, MetaConformance,
    testing::Values(MetaBackend{"etcd",
                                [] {
                                  return server() == nullptr ? nullptr
                                                             : open_etcd_meta(options()).value();
                                }}),
    [](const auto& backend) { return backend.param.name; });

}  // namespace
}  // namespace ptc
