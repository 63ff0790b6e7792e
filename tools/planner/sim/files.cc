#include "tools/planner/sim/files.h"

#include <fmt/format.h>

#include <boost/json/serialize.hpp>
#include <cmath>

#include "tools/planner/profile/csv.h"

namespace ptc::planner {
namespace {

/// Milliseconds are enough, and the same everywhere.
double rounded(double value) { return std::round(value * 1000) / 1000; }
std::string text_of(const std::optional<double>& seconds) {
  return seconds ? fmt::format("{:.3f}", *seconds) : "";
}

const char* word_of(SimulatedEvent::What what) {
  switch (what) {
    case SimulatedEvent::What::kArrives:
      return "arrives";
    case SimulatedEvent::What::kStarts:
      return "starts";
    case SimulatedEvent::What::kChanges:
      return "changes";
    case SimulatedEvent::What::kStops:
      return "stops";
    case SimulatedEvent::What::kEnds:
      return "ends";
    case SimulatedEvent::What::kDropped:
      return "is dropped";
    case SimulatedEvent::What::kFails:
      return "fails";
    case SimulatedEvent::What::kReturns:
      return "returns";
  }
  return "";
}

}  // namespace

std::string jobs_csv(const std::vector<JobToTrain>& kinds, const std::vector<ArrivingJob>& jobs,
                     const Simulated& run) {
  std::string out =
      "name,job,model,arrival_s,start_s,end_s,completion_s,samples,lost_samples,gpu_hours,changes,"
      "dropped\n";
  for (size_t i = 0; i < jobs.size(); ++i) {
    const JobOutcome& job = run.jobs[i];
    const JobToTrain& kind = kinds[jobs[i].kind];
    out += fmt::format("{},{},{},{:.3f},{},{},{},{:.3f},{:.3f},{:.4f},{},{}\n",
                       csv_field(jobs[i].name), csv_field(kind.name), csv_field(kind.model),
                       jobs[i].at_s, text_of(job.start), text_of(job.end),
                       job.end ? fmt::format("{:.3f}", *job.end - jobs[i].at_s) : "", job.samples,
                       job.lost_samples, job.gpu_s / 3600, job.changes, job.dropped ? 1 : 0);
  }
  return out;
}

std::string events_jsonl(const std::vector<NodeOfCluster>& nodes,
                         const std::vector<ArrivingJob>& jobs, const Simulated& run) {
  std::string out;
  for (const SimulatedEvent& event : run.events) {
    const bool is_of_node =
        event.what == SimulatedEvent::What::kFails || event.what == SimulatedEvent::What::kReturns;
    const std::string& name = is_of_node ? nodes[event.subject].name : jobs[event.subject].name;
    out += fmt::format("{{\"t_s\": {:.3f}, \"what\": \"{}\", \"{}\": {}", event.at,
                       word_of(event.what), is_of_node ? "node" : "job",
                       json::serialize(json::string(name)));
    if (event.gpus != 0)
      out += fmt::format(", \"gpus\": {}, \"batch\": {}", event.gpus, event.batch);
    out += "}\n";
  }
  return out;
}

json::object summary_json(const Summary& sum) {
  return {{"jobs", sum.jobs},
          {"done", sum.done},
          {"done_in_window", sum.done_in_window},
          {"dropped", sum.dropped},
          {"mean_completion_s", rounded(sum.mean_s)},
          {"median_completion_s", rounded(sum.median_s)},
          {"p99_completion_s", rounded(sum.p99_s)},
          {"makespan_s", rounded(sum.makespan_s)},
          {"changes", sum.changes},
          {"gpu_hours", rounded(sum.gpu_hours)},
          {"utilisation", rounded(sum.utilisation)}};
}

}  // namespace ptc::planner
