#include "fs/report/metrics.h"

#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "fs/report/autoscale_note.h"
#include "fs/report/metrics_writer.h"
#include "fs/report/reports.h"
#include "fs/report/version.h"
#include "store/tls/certificate_spans.h"

namespace ptc {
namespace {

void write_operations(MetricsWriter& out, Tree& tree) {
  std::vector<std::pair<std::string_view, Stats::OpCounts>> asked;
  for (size_t i = 0; i < kOpCount; ++i) {
    const Op op = static_cast<Op>(i);
    Stats::OpCounts counts = tree.stats().counts(op);
    if (counts.requests > 0) asked.emplace_back(op_name(op), counts);
  }
  out.family("ptcfs_requests_total", "counter", "Requests of the kernel.");
  for (const auto& [name, counts] : asked) out.sample({{"operation", name}}, counts.requests);
  out.family("ptcfs_request_errors_total", "counter", "Requests answered with an errno.");
  for (const auto& [name, counts] : asked) out.sample({{"operation", name}}, counts.errors);
  out.family(
      "ptcfs_request_duration_seconds", "histogram",
      "Time from a request to its answer; what the kernel does by itself is not among them.");
  std::array<double, kDurationBuckets.size()> ends;
  std::transform(kDurationBuckets.begin(), kDurationBuckets.end(), ends.begin(),
                 [](int64_t end_ns) { return static_cast<double>(end_ns) / 1e9; });
  for (const auto& [name, counts] : asked)
    out.histogram("operation", name, ends, counts.answered,
                  static_cast<double>(counts.duration_ns) / 1e9);
  out.single("ptcfs_read_bytes_total", "counter",
             "Bytes read through the daemon; what the kernel reads by itself is not among them.",
             tree.stats().counts(Op::kRead).bytes);
  out.single(
      "ptcfs_written_bytes_total", "counter",
      "Bytes written through the daemon; what the kernel writes by itself is not among them.",
      tree.stats().counts(Op::kWrite).bytes);
  out.single("ptcfs_requests_in_flight", "gauge", "Requests being answered.",
             tree.stats().in_flight().size());
  out.single("ptcfs_nodes", "gauge", "Files and directories that the kernel knows.",
             tree.table().size());
}

void write_kernel_reads(MetricsWriter& out, Tree& tree) {
  const Passthrough& passthrough = tree.passthrough();
  out.single("ptcfs_passthrough_enabled", "gauge", "1 if the kernel reads images by itself.",
             passthrough.enabled() ? 1 : 0);
  out.single("ptcfs_passthrough_opens_total", "counter",
             "Opens of files that the kernel then reads and writes by itself.",
             passthrough.opens());
  out.single("ptcfs_passthrough_files", "gauge", "Files that the kernel reads by itself now.",
             passthrough.files());
  if (const MemoryReserve* reserve = tree.store().images().reserve())
    out.single("ptcfs_store_reserve_bytes", "gauge",
               "Memory that is kept for images and files to come; the kernel may have taken some.",
               reserve->held());
  const GatherCache::Numbers cache = tree.gathered().numbers();
  out.single("ptcfs_gather_cache_limit_bytes", "gauge",
             "Memory that files computed on read may take.", tree.gathered().limit_bytes());
  out.single("ptcfs_gather_cache_bytes", "gauge", "Memory that files computed on read take.",
             cache.bytes);
  out.single("ptcfs_gather_cache_files", "gauge", "Files computed on read that are in memory.",
             cache.files);
  out.single("ptcfs_gather_cache_hits_total", "counter", "Opens that found their file in memory.",
             cache.hits);
  out.single("ptcfs_gather_cache_misses_total", "counter", "Opens that had their file gathered.",
             cache.misses);
  out.single("ptcfs_gather_cache_refusals_total", "counter",
             "Opens that found no room, and read through the daemon.", cache.refused);
  out.single("ptcfs_gather_cache_gathered_bytes_total", "counter", "Bytes gathered.",
             cache.gathered_bytes);
  out.family("ptcfs_gather_cache_evictions_total", "counter",
             "Files given up, because others came (room) or nobody did (idle).");
  out.sample({{"reason", "room"}}, cache.evicted_for_room);
  out.sample({{"reason", "idle"}}, cache.evicted_idle);
}

void write_store(MetricsWriter& out, Tree& tree) {
  const StoreSpace space = store_space(tree);
  out.single("ptcfs_store_limit_bytes", "gauge", "Size of the file system of the store.",
             space.total_bytes);
  out.single("ptcfs_store_used_bytes", "gauge", "Used of it, by whatever.", space.used_bytes);
  out.single("ptcfs_store_materialised_bytes", "gauge", "Bytes of checkpoints stored on this node.",
             materialised_bytes(tree));
}

/// Of the connections with each other node, which counts the same from its end.
void write_peers(MetricsWriter& out, Tree& tree) {
  const std::vector<PeerNumbers> peers = tree.store().traffic();
  auto counter = [&](std::string_view name, std::string_view help, uint64_t PeerNumbers::*number) {
    out.family(name, "counter", help);
    for (const PeerNumbers& peer : peers) out.sample({{"peer", peer.node}}, peer.*number);
  };
  counter("ptcfs_peer_sent_bytes_total", "Bytes that this node sent another.",
          &PeerNumbers::bytes_sent);
  counter("ptcfs_peer_received_bytes_total", "Bytes that another node sent this one.",
          &PeerNumbers::bytes_received);
  counter("ptcfs_peer_connections_total", "Connections with another node.",
          &PeerNumbers::connections);
  counter("ptcfs_peer_broken_connections_total",
          "Connections that ended in the middle of something.", &PeerNumbers::broken_connections);
  counter("ptcfs_peer_checksum_failures_total", "Frames that did not arrive as they were sent.",
          &PeerNumbers::checksum_failures);
  counter("ptcfs_peer_retries_total", "Fetches that went on over another connection.",
          &PeerNumbers::retries);
  counter("ptcfs_peer_calls_total", "Calls of another node that ended, with an answer or without.",
          &PeerNumbers::calls);
  counter("ptcfs_peer_failed_calls_total", "Of these those without an answer.",
          &PeerNumbers::failed_calls);
  out.family("ptcfs_peer_call_seconds_total", "counter",
             "Time from calls to their ends, with connecting, and with what the other node waited "
             "for.");
  for (const PeerNumbers& peer : peers)
    out.sample({{"peer", peer.node}}, static_cast<double>(peer.call_ns) / 1e9);
}

/// What this node alone knows.
void write_agreement(MetricsWriter& out, Tree& tree) {
  const std::vector<NodeReport> nodes = tree.store().node_reports();
  const bool decides = !tree.store().distrusted() &&
                       std::none_of(nodes.begin(), nodes.end(), [](const NodeReport& node) {
                         return std::string_view(node.state) == "fenced";
                       });
  out.single("ptcfs_agreement_decides", "gauge",
             "1 if this node reaches the agreement store and believes it; else it decides nothing.",
             decides ? 1 : 0);
  // A cluster of one has none.
  const std::optional<NodeService> service = tree.store().service();
  auto one = [&](std::string_view name, std::string_view type, std::string_view help, auto number) {
    out.family(name, type, help);
    if (service) out.sample({}, number(service->numbers));
  };
  using Numbers = AgreementNumbers;
  one("ptcfs_agreement_lease_remaining_seconds", "gauge",
      "How long this node's lease goes on at least; 0: it may have ended.",
      [](const Numbers& of) { return of.lease_left_seconds; });
  one("ptcfs_agreement_lease_losses_total", "counter",
      "How often the lease had ended, or may have, and the node had to join again.",
      [](const Numbers& of) { return of.lease_losses; });
  one("ptcfs_agreement_term", "gauge",
      "Of the agreement store's leader, as was heard last; it grows with each election.",
      [](const Numbers& of) { return of.asked.term; });
  one("ptcfs_agreement_calls_total", "counter",
      "Calls of the agreement store that ended, with an answer or without.",
      [](const Numbers& of) { return of.asked.calls; });
  one("ptcfs_agreement_failed_calls_total", "counter", "Of these those without an answer.",
      [](const Numbers& of) { return of.asked.failed_calls; });
  one("ptcfs_agreement_retries_total", "counter",
      "Calls made once more, for an endpoint did not answer.",
      [](const Numbers& of) { return of.asked.retries; });
  one("ptcfs_agreement_call_seconds_total", "counter", "Time from calls to their ends.",
      [](const Numbers& of) { return static_cast<double>(of.asked.call_ns) / 1e9; });
}

/// Read anew, for they are exchanged while the daemon runs. Of a file with several certificates the
/// first one that ends counts; of authorities the last, for one that was replaced is left there.
void write_certificates(MetricsWriter& out, Tree& tree) {
  std::vector<std::pair<std::string_view, CertificateSpan>> spans;
  for (const std::string_view option : {"tls-ca", "tls-cert", "etcd-ca", "etcd-cert"}) {
    const json::value* path = tree.options().if_contains(option);
    if (path == nullptr || !path->is_string()) continue;
    const auto all = certificate_spans(std::string(path->get_string()));
    if (!all || all.value().empty()) continue;
    const auto ends_before = [](const CertificateSpan& one, const CertificateSpan& other) {
      return one.not_after < other.not_after;
    };
    const auto [first, last] =
        std::minmax_element(all.value().begin(), all.value().end(), ends_before);
    spans.emplace_back(option, option.ends_with("-ca") ? *last : *first);
  }
  auto gauge = [&](std::string_view name, std::string_view help, int64_t CertificateSpan::*second) {
    out.family(name, "gauge", help);
    for (const auto& [option, span] : spans)
      out.sample({{"option", option}}, static_cast<double>(span.*second));
  };
  gauge("ptcfs_certificate_not_after_timestamp_seconds",
        "When the certificate that this option names ends, since the epoch.",
        &CertificateSpan::not_after);
  gauge("ptcfs_certificate_not_before_timestamp_seconds", "When it begins.",
        &CertificateSpan::not_before);
}

/// What all nodes know alike; of several nodes the maximum says it, not the sum.
void write_cluster(MetricsWriter& out, Tree& tree) {
  const std::vector<NodeReport> nodes = tree.store().node_reports();
  auto gauge = [&](std::string_view name, std::string_view help, auto number) {
    out.family(name, "gauge", help);
    for (const NodeReport& node : nodes) out.sample({{"node", node.name}}, number(node));
  };
  gauge("ptcfs_cluster_node_up",
        "1 if the node is there; the same on all nodes, as are all ptcfs_cluster_ metrics.",
        [](const NodeReport& node) { return std::string_view(node.state) == "up" ? 1 : 0; });
  gauge("ptcfs_cluster_node_since_seconds",
        "Since when the node is there, or not, since the epoch; 0: not known.",
        [](const NodeReport& node) { return static_cast<double>(node.since_ns) / 1e9; });
  gauge("ptcfs_cluster_node_draining", "1 if it shall hold nothing.",
        [](const NodeReport& node) { return node.draining ? 1 : 0; });
  gauge("ptcfs_cluster_node_materialised_bytes",
        "Bytes of checkpoints that lie on the node, within reach or not.",
        [](const NodeReport& node) { return node.stored_bytes; });
  auto said = [&](std::string_view name, const std::string& what, uint64_t NodeNumbers::*number) {
    out.family(name, "gauge", what + ", as the node said last; of those that are there.");
    for (const NodeReport& node : nodes)
      if (node.numbers) out.sample({{"node", node.name}}, (*node.numbers).*number);
  };
  said("ptcfs_cluster_node_memory_limit_bytes", "Size of the file system of the node's store",
       &NodeNumbers::memory_total_bytes);
  said("ptcfs_cluster_node_memory_used_bytes", "Used of it", &NodeNumbers::memory_used_bytes);
  said("ptcfs_cluster_node_sent_bytes", "Sent to other nodes since the start of its daemon",
       &NodeNumbers::sent_bytes);
  said("ptcfs_cluster_node_received_bytes", "Received of them", &NodeNumbers::received_bytes);
}

void write_jobs(MetricsWriter& out, Tree& tree) {
  std::vector<std::pair<std::string, JobNumbers>> jobs;
  for (const JobRef& job : tree.store().jobs()) jobs.emplace_back(job->name(), job->numbers());
  out.single("ptcfs_jobs", "gauge", "Jobs; the same on all nodes.", jobs.size());

  auto gauge = [&](std::string_view name, std::string_view help, auto number) {
    out.family(name, "gauge", help);
    for (const auto& [job, numbers] : jobs) out.sample({{"job", job}}, number(numbers));
  };
  gauge("ptcfs_job_revision", "Revision of the layout wanted; the same on all nodes.",
        [](const JobNumbers& numbers) { return numbers.revision; });
  gauge("ptcfs_job_in_force_revision", "Revision of the layout in force; the same on all nodes.",
        [](const JobNumbers& numbers) { return numbers.in_force_revision; });
  out.family("ptcfs_job_state", "gauge", "1 for the state that the job is in.");
  for (const auto& [job, numbers] : jobs)
    for (JobState state : kJobStates)
      out.sample({{"job", job}, {"state", state_name(state)}}, numbers.state == state ? 1 : 0);
  gauge("ptcfs_job_checkpoints", "Committed checkpoints; the same on all nodes.",
        [](const JobNumbers& numbers) { return numbers.checkpoints; });
  out.family("ptcfs_job_newest_checkpoint_timestamp_seconds", "gauge",
             "When the newest checkpoint was committed, since the epoch; the same on all nodes.");
  for (const auto& [job, numbers] : jobs)
    if (numbers.newest_time_ns != 0)
      out.sample({{"job", job}}, static_cast<double>(numbers.newest_time_ns) / 1e9);
  gauge("ptcfs_job_lost_tensors",
        "Tensors of the job's checkpoints of which no node that is there has some part.",
        [](const JobNumbers& numbers) { return numbers.lost_tensors; });
  gauge("ptcfs_job_unreadable_checkpoints",
        "Checkpoints that cannot be shown: no node that is there has what describes them, or it is "
        "damaged.",
        [](const JobNumbers& numbers) { return numbers.unreadable; });
  gauge("ptcfs_job_checkpoint_bytes",
        "Bytes of the job's checkpoints that are stored on this node.",
        [](const JobNumbers& numbers) { return numbers.stored_bytes; });
  gauge("ptcfs_job_progress_bytes",
        "Written by the reshard that runs, on all nodes together; 0 while none does.",
        [](const JobNumbers& numbers) { return numbers.progress_bytes; });
  gauge("ptcfs_job_progress_limit_bytes",
        "What the reshard that runs will have written, on all nodes together; 0 while none does.",
        [](const JobNumbers& numbers) { return numbers.progress_total_bytes; });

  gauge("ptcfs_job_missing_copy_bytes",
        "Bytes of copies that 'replicas' asks for and that are not there; the same on all nodes.",
        [](const JobNumbers& numbers) { return numbers.missing_copy_bytes; });
  gauge("ptcfs_job_mendings",
        "How often damaged bytes of the checkpoints that are there were mended; the same on all "
        "nodes.",
        [](const JobNumbers& numbers) { return numbers.mendings; });
  gauge("ptcfs_job_damage_left",
        "What was found damaged when the checkpoints were last looked over, and has no copy that "
        "is right; the same on all "
        "nodes.",
        [](const JobNumbers& numbers) { return numbers.damage_left; });

  out.family("ptcfs_job_hashed_bytes_total", "counter",
             "Hashed at the close of files and by commits.");
  for (const auto& [job, numbers] : jobs) out.sample({{"job", job}}, numbers.counts.hashed_bytes);

  auto outcomes = [&](std::string_view name, std::string_view help, auto counts) {
    out.family(name, "counter", help);
    for (const auto& [job, numbers] : jobs)
      for (const auto& [outcome, count] : counts(numbers.counts))
        out.sample({{"job", job}, {"outcome", outcome}}, count);
  };
  using Outcome = std::pair<const char*, uint64_t>;
  outcomes("ptcfs_job_reshards_total", "Reshards ended; a newer edit abandons one.",
           [](const JobCounts& counts) {
             return std::array{Outcome{"done", counts.reshards_done},
                               Outcome{"failed", counts.reshards_failed},
                               Outcome{"abandoned", counts.reshards_abandoned}};
           });
  outcomes("ptcfs_job_commits_total", "Commits of incoming/<name>.", [](const JobCounts& counts) {
    return std::array{Outcome{"done", counts.commits_done},
                      Outcome{"refused", counts.commits_refused}};
  });

  out.family(
      "ptcfs_job_damage_found_total", "counter",
      "Damaged copies, each time that this node led a look over a checkpoint that found one.");
  for (const auto& [job, numbers] : jobs) out.sample({{"job", job}}, numbers.counts.damaged_found);
  outcomes("ptcfs_job_damaged_copies_total",
           "Copies found damaged: mended where they lie, made anew, or left, for no other copy is "
           "right.",
           [](const JobCounts& counts) {
             return std::array{Outcome{"mended", counts.damaged_mended},
                               Outcome{"replaced", counts.damaged_replaced},
                               Outcome{"left", counts.damaged_left}};
           });

  auto last = [&](std::string_view name, std::string_view help, auto write) {
    out.family(name, "gauge", help);
    for (const auto& [job, numbers] : jobs)
      if (numbers.last_reshard) write(job, *numbers.last_reshard);
  };
  last("ptcfs_job_last_reshard_bytes",
       "Of the last reshard, on all nodes together and the same on each: kept where they were, "
       "copied on a node (local), moved between nodes, "
       "and the least that could be moved (minimum).",
       [&](const std::string& job, const JobNumbers::LastReshard& reshard) {
         const TransferPlan::Totals& totals = reshard.totals;
         for (const auto& [kind, bytes] :
              {std::pair("kept", totals.kept_bytes), std::pair("local", totals.local_bytes),
               std::pair("moved", totals.moved_bytes), std::pair("minimum", totals.minimum_bytes)})
           out.sample({{"job", job}, {"kind", kind}}, bytes);
       });
  last("ptcfs_job_last_reshard_duration_seconds",
       "How long the last reshard took; the same on all nodes.",
       [&](const std::string& job, const JobNumbers::LastReshard& reshard) {
         out.sample({{"job", job}}, reshard.seconds);
       });
  out.family("ptcfs_job_last_commit_duration_seconds", "gauge", "How long the last commit took.");
  for (const auto& [job, numbers] : jobs)
    if (numbers.counts.last_commit_seconds)
      out.sample({{"job", job}}, *numbers.counts.last_commit_seconds);
}

/// Of jobs that somebody has looked at since the daemon was started: to look for others' would be
/// to begin to follow them.
void write_data_sets(MetricsWriter& out, Tree& tree) {
  std::vector<std::pair<std::string, DataSetNumbers>> sets;
  for (const JobRef& job : tree.store().jobs()) {
    const JobViewRef view = tree.known_view(job->name());
    if (view == nullptr) continue;
    if (auto numbers = view->data_set().numbers()) sets.emplace_back(job->name(), *numbers);
  }
  out.family("ptcfs_dataset_state", "gauge", "1 for the state that the job's data set is in.");
  for (const auto& [job, numbers] : sets)
    for (const std::string_view state : kDataSetStates)
      out.sample({{"job", job}, {"state", state}}, numbers.state == state ? 1 : 0);
  out.family("ptcfs_dataset_read_errors", "gauge",
             "Errors of reading shards on this node of the last ten minutes; some are left out.");
  for (const auto& [job, numbers] : sets) out.sample({{"job", job}}, numbers.read_errors);
  out.family(
      "ptcfs_dataset_consumed_samples", "gauge",
      "Position of the run: samples that are done; the same on all nodes, as the following.");
  for (const auto& [job, numbers] : sets) out.sample({{"job", job}}, numbers.consumed);
  using OfRun = DataSetNumbers::OfRun;
  auto of_run = [&](std::string_view name, std::string_view help, auto number) {
    out.family(name, "gauge", help);
    for (const auto& [job, numbers] : sets)
      if (numbers.run) out.sample({{"job", job}}, number(numbers, *numbers.run));
  };
  using Set = DataSetNumbers;
  of_run("ptcfs_dataset_epoch", "Epochs that are done; this one is under way.",
         [](const Set& set, const OfRun& run) { return set.consumed / run.samples; });
  of_run("ptcfs_dataset_samples", "Samples of an epoch.",
         [](const Set&, const OfRun& run) { return run.samples; });
  of_run("ptcfs_dataset_end_samples", "Position at which the run ends.",
         [](const Set&, const OfRun& run) { return run.end; });
  of_run("ptcfs_dataset_batch_samples", "Samples of a global batch.",
         [](const Set&, const OfRun& run) { return run.batch; });
  of_run("ptcfs_dataset_dp_ranks", "Data-parallel ranks that read.",
         [](const Set&, const OfRun& run) { return run.dp; });
  of_run("ptcfs_dataset_generation", "Generation that head names; each change of cuts makes one.",
         [](const Set&, const OfRun& run) { return run.generation; });
  of_run("ptcfs_dataset_dp_changes", "How often dp has changed in the run as it is now.",
         [](const Set&, const OfRun& run) { return run.dp_changes; });
}

/// Since the epoch. Field 22 of /proc/self/stat is in ticks since the boot.
double process_start_seconds() {
  std::ifstream file("/proc/self/stat");
  std::string text{std::istreambuf_iterator<char>(file), {}};
  std::istringstream fields(text.substr(std::min(text.rfind(')') + 1, text.size())));
  std::string skipped;
  for (int field = 3; field < 22; ++field) fields >> skipped;
  double ticks = 0;
  fields >> ticks;
  auto clock_seconds = [](clockid_t clock) {
    timespec now = {};
    ::clock_gettime(clock, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) / 1e9;
  };
  return clock_seconds(CLOCK_REALTIME) - clock_seconds(CLOCK_BOOTTIME) +
         ticks / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

uint64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  uint64_t all = 0, resident = 0;
  file >> all >> resident;
  return resident * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

/// The names are those that all programs use.
void write_process(MetricsWriter& out, Tree& tree) {
  out.family("ptcfs_build_info", "gauge", "Always 1; what is running is in the labels.");
  out.sample({{"version", kVersion}, {"node", tree.store().node()}}, 1);
  static const double started = process_start_seconds();  // once: clocks are adjusted
  out.single("process_start_time_seconds", "gauge", "Start of the daemon since the epoch.",
             started);
  rusage usage = {};
  ::getrusage(RUSAGE_SELF, &usage);
  auto seconds_of = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
  };
  out.single("process_cpu_seconds_total", "counter", "Time of processors that the daemon took.",
             seconds_of(usage.ru_utime) + seconds_of(usage.ru_stime));
  out.single("process_resident_memory_bytes", "gauge",
             "Memory of the daemon; the store is not in it, except where it is mapped.",
             resident_bytes());
  std::error_code error;
  std::filesystem::directory_iterator open_files("/proc/self/fd", error);
  out.single("process_open_fds", "gauge", "Open files of the daemon.",
             error ? 0 : std::distance(begin(open_files), end(open_files)));
  rlimit limit = {};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  out.single("process_max_fds", "gauge", "Files that it may open.", limit.rlim_cur);
}

/// What `ptc autoscale` has decided for jobs, as it wrote that down.
void write_autoscale(MetricsWriter& out, Tree& tree) {
  std::vector<std::pair<std::string, AutoscaleNote>> notes;
  for (const JobRef& job : tree.store().jobs())
    if (auto note = read_autoscale_note(job->files_dir()))
      notes.emplace_back(job->name(), std::move(*note));
  if (notes.empty()) return;
  auto each = [&](std::string_view name, std::string_view type, std::string_view help,
                  auto number) {
    out.family(name, type, help);
    for (const auto& [job, note] : notes) out.sample({{"job", job}}, number(note));
  };
  out.family("ptcfs_job_autoscale_state", "gauge", "1 for what the autoscaler says of the job.");
  for (const auto& [job, note] : notes)
    out.sample({{"job", job}, {"state", note.state}}, uint64_t{1});
  each("ptcfs_job_autoscale_gpus", "gauge", "GPUs that the job has been given.",
       [](const AutoscaleNote& note) { return note.gpus; });
  each("ptcfs_job_autoscale_batch", "gauge", "Samples of its global batch.",
       [](const AutoscaleNote& note) { return note.batch; });
  each("ptcfs_job_autoscale_starts_total", "counter", "How often it was started.",
       [](const AutoscaleNote& note) { return note.changes; });
  each("ptcfs_job_autoscale_failures", "gauge", "Ends without progress, one after the other.",
       [](const AutoscaleNote& note) { return note.failures; });
  each("ptcfs_job_autoscale_price_seconds", "gauge", "What its last change was thought to cost.",
       [](const AutoscaleNote& note) { return note.price_s; });
  out.family("ptcfs_job_autoscale_decision_info", "gauge", "The last decision, and why; always 1.");
  for (const auto& [job, note] : notes)
    out.sample({{"job", job},
                {"from_gpus", std::to_string(note.from_gpus)},
                {"to_gpus", std::to_string(note.to_gpus)},
                {"why", note.why}},
               uint64_t{1});
}

}  // namespace

std::string metrics_text(Tree& tree) {
  MetricsWriter out;
  write_process(out, tree);
  write_operations(out, tree);
  write_kernel_reads(out, tree);
  write_store(out, tree);
  write_peers(out, tree);
  write_agreement(out, tree);
  write_certificates(out, tree);
  write_cluster(out, tree);
  write_jobs(out, tree);
  write_data_sets(out, tree);
  write_autoscale(out, tree);
  return out.take();
}

}  // namespace ptc
