// What `ptc doctor` makes of what it knows. Each check is a function of the facts alone, and says
// one thing: that all is well, or the worst of what is not.
#pragma once

#include <string>
#include <vector>

#include "tools/ptc/doctor_facts.h"

namespace ptc::cli {

/// kWarn: it works, but slower, or not for long. kFail: something does not work, or soon will not.
enum class Level { kOk, kWarn, kFail };

struct Finding {
  Level level = Level::kOk;
  std::string name;
  std::string found;
  std::string advice = {};  // what to do; empty: nothing
};

// Of the machine, and of the daemon where there is one (doctor_machine.cc).
Finding check_kernel(const Facts& facts);
Finding check_fuse_device(const Facts& facts);
Finding check_rights(const Facts& facts);  // capabilities, or what users need in their place
Finding check_passthrough(const Facts& facts);
Finding check_io_uring(const Facts& facts);
Finding check_memory(const Facts& facts);
Finding check_group_memory(const Facts& facts);
Finding check_swap(const Facts& facts);
Finding check_overcommit(const Facts& facts);
Finding check_huge_pages(const Facts& facts);
Finding check_open_files(const Facts& facts);
Finding check_threads(const Facts& facts);
Finding check_mappings(const Facts& facts);
Finding check_daemon(const Facts& facts);
Finding check_space(const Facts& facts);
Finding check_leftovers(const Facts& facts);

// Of a cluster (doctor_cluster.cc). Without one nothing is wrong.
Finding check_clock(const Facts& facts);
Finding check_node_clocks(const Facts& facts);
Finding check_nodes(const Facts& facts);
Finding check_versions(const Facts& facts);
Finding check_agreement(const Facts& facts);
Finding check_etcd(const EtcdFacts& etcd, const Facts& facts);
Finding check_certificate(const CertificateFacts& certificate, int64_t now);

/// All that say something of such facts, in the order in which they are shown.
std::vector<Finding> check_all(const Facts& facts);

}  // namespace ptc::cli
