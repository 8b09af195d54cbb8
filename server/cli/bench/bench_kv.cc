#include "server/cli/bench/bench_kv.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "engine/kv/kv_prompt.h"
#include "engine/kv/kv_store.h"
#include "kernels/median.h"
#include "kernels/monotonic_time.h"
#include "kernels/return_if_error.h"
#include "meshfill/v1/prefill.grpc.pb.h"
#include "nlohmann/json.hpp"
#include "server/api/decoded.h"
#include "server/api/kv_fetch.h"
#include "server/api/kv_service.h"
#include "server/api/refused_stream.h"
#include "server/api/store_leases.h"
#include "server/cli/commands/flags.h"

namespace meshfill {
namespace {

constexpr char kRawLease[] = "raw";
constexpr int kRounds = 5;

// The same message again and again: what gRPC itself takes for so many bytes.
class RawStream final : public KvFetchReactor {
 public:
  RawStream(const v1::KvPart& part, int64_t count) : part_(part), left_(count) { Next(); }
  void OnWriteDone(bool ok) override { ok ? Next() : Finish(grpc::Status::CANCELLED); }
  void OnDone() override { delete this; }

 private:
  void Next() {
    if (left_-- == 0) return Finish(grpc::Status::OK);
    Encode(part_, sent_);
    StartWrite(&sent_);
  }

  const v1::KvPart& part_;
  int64_t left_;
  grpc::ByteBuffer sent_;
};

class BenchService final
    : public v1::PrefillService::WithRawCallbackMethod_FetchKv<v1::PrefillService::CallbackService> {
 public:
  BenchService(KvService& kv, v1::KvPart raw, int64_t raw_count)
      : kv_(kv), raw_(std::move(raw)), raw_count_(raw_count) {}

  KvFetchReactor* FetchKv(grpc::CallbackServerContext* context, const grpc::ByteBuffer* bytes) override {
    auto request = Decoded<v1::FetchKvRequest>(*bytes, kv_.options().streams.max_message_bytes);
    if (!request.ok()) return new RefusedStream<KvFetchReactor>(request.status());
    if (request->lease() == kRawLease) return new RawStream(raw_, raw_count_);
    return kv_.Fetch(context, "", *std::move(request));
  }

 private:
  KvService& kv_;
  const v1::KvPart raw_;
  const int64_t raw_count_;
};

class BenchKvCommand : public Command {
 public:
  explicit BenchKvCommand(CLI::App& parent)
      : Command(parent.add_subcommand("kv", "FetchKv in each layout, beside a raw gRPC stream")) {
    const auto count = [this](const char* name, int& value, const char* help) {
      app_->add_option(name, value, help)->type_name("N")->check(WholeNumber(1))->capture_default_str();
    };
    count("--tokens", tokens_, "Tokens of the prompt");
    count("--layers", shape_.layers, "Layers that are fetched");
    count("--kv-heads", shape_.kv_heads, "KV heads");
    count("--head-dim", shape_.head_dim, "Elements of a head, of two bytes");
    count("--ranks", ranks_, "Ranks that hold the tokens");
    AddJsonFlag(*app_, json_);
  }

  absl::Status Run() override {
    setenv("GRPC_VERBOSITY", "NONE", /*overwrite=*/0);
    KvStore store(shape_.layers * shape_.LayerBytes(tokens_));
    const auto prompt = std::make_shared<KvPrompt>(shape_, tokens_);
    Metrics metrics;
    StoreLeases leases(store);
    KvService kv(leases, {}, metrics);
    ASSIGN_OR_RETURN(const std::unique_ptr<KvLease> lease, store.Admit(prompt, "", kv.options().lease));
    RETURN_IF_ERROR(Fill(*prompt));
    ASSIGN_OR_RETURN(const KvFetch fetch,
                     CheckFetch({}, shape_, tokens_, kv.options().streams.max_message_bytes));
    v1::KvPart raw;
    RETURN_IF_ERROR(
        FillPart(fetch, *prompt->Layer(0), 0, 0, std::min<int64_t>(tokens_, fetch.part_tokens), raw));
    const int64_t parts = (tokens_ + fetch.part_tokens - 1) / fetch.part_tokens * shape_.layers;

    BenchService service(kv, std::move(raw), parts);
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&service);
    const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
    if (server == nullptr || port == 0) return absl::UnavailableError("no port is free on 127.0.0.1");
    absl::Status status = Measure(absl::StrFormat("127.0.0.1:%d", port), lease->id());
    server->Shutdown();
    kv.WaitUntilNoStream();
    return status;
  }

 private:
  absl::Status Fill(KvPrompt& prompt) const {
    ASSIGN_OR_RETURN(const TokenLayout layout, TokenLayout::Make(LayoutKind::kStriped, ranks_, tokens_, 64));
    prompt.Begin(layout);
    for (int layer = 0; layer < shape_.layers; ++layer) {
      for (int rank = 0; rank < ranks_; ++rank) {
        ASSIGN_OR_RETURN(std::byte * slab, prompt.Place(rank, layer));
        std::memset(slab, rank + 1, static_cast<size_t>(shape_.LayerBytes(layout.ChunkTokens(rank))));
        prompt.OnLayerKept(rank, layer);
      }
    }
    return absl::OkStatus();
  }

  // Rounds of all in turn; of each the median's bytes per second, and its part of the raw stream's.
  absl::Status Measure(const std::string& address, const std::string& lease) {
    const auto stub =
        v1::PrefillService::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
    struct Row {
      const char* name;
      v1::FetchKvRequest request;
      std::vector<double> bytes_per_second;
    };
    std::vector<Row> rows(4);
    rows[0].name = "raw stream";
    rows[0].request.set_lease(kRawLease);
    const v1::KvLayout layouts[] = {v1::KV_LAYOUT_TOKENS, v1::KV_LAYOUT_PAGES_HND, v1::KV_LAYOUT_PAGES_NHD};
    const char* const names[] = {"tokens", "pages HND", "pages NHD"};
    for (int i = 0; i < 3; ++i) {
      Row& row = rows[i + 1];
      row.name = names[i];
      row.request.set_lease(lease);
      row.request.set_layout(layouts[i]);
      if (layouts[i] != v1::KV_LAYOUT_TOKENS) row.request.set_page_tokens(16);
    }
    for (int round = 0; round < kRounds; ++round) {
      for (Row& row : rows) {
        ASSIGN_OR_RETURN(const double speed, BytesPerSecond(*stub, row.request));
        row.bytes_per_second.push_back(speed);
      }
    }
    nlohmann::ordered_json json;
    const double raw = Median(rows[0].bytes_per_second);
    for (const Row& row : rows) {
      const double speed = Median(row.bytes_per_second);
      if (!json_) absl::PrintF("%-12s %7.3f GB/s  %4.2f of raw\n", row.name, speed / 1e9, speed / raw);
      json[row.name] = {{"bytes_per_second", speed}, {"of_raw", speed / raw}};
    }
    if (json_) absl::PrintF("%s\n", json.dump());
    return absl::OkStatus();
  }

  static absl::StatusOr<double> BytesPerSecond(v1::PrefillService::Stub& stub,
                                               const v1::FetchKvRequest& request) {
    grpc::ClientContext context;
    const absl::Time start = MonotonicNow();
    const auto stream = stub.FetchKv(&context, request);
    v1::KvPart part;
    double bytes = 0;
    while (stream->Read(&part)) {
      bytes += static_cast<double>(part.k().size() + part.v().size() + part.pages().size());
    }
    if (const grpc::Status status = stream->Finish(); !status.ok()) {
      return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
    }
    return bytes / absl::ToDoubleSeconds(MonotonicNow() - start);
  }

  KvShape shape_ = {.layers = 4, .kv_heads = 8, .head_dim = 128, .dtype = DType::kBf16};
  int tokens_ = 32768;
  int ranks_ = 4;
  bool json_ = false;
};

}  // namespace

std::unique_ptr<Command> AddBenchKvCommand(CLI::App& parent) {
  return std::make_unique<BenchKvCommand>(parent);
}

}  // namespace meshfill
