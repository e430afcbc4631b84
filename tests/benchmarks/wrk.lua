-- Sends the lines of a file as JSON bodies, in turn, and prints what came of it as one JSON line.
-- wrk -s wrk.lua URL -- FILE

function init(arguments)
  wrk.method = "POST"
  wrk.headers["Content-Type"] = "application/json"
  requests = {}
  for body in io.lines(arguments[1]) do
    requests[#requests + 1] = wrk.format(nil, nil, nil, body)
  end
  sent = 0
end

function request()
  sent = sent + 1
  return requests[(sent - 1) % #requests + 1]
end

function done(summary, latency)
  local errors = summary.errors
  print(string.format(
    'RESULT {"requests": %d, "seconds": %f, "p50_ms": %f, "p99_ms": %f, "failed": %d}',
    summary.requests, summary.duration / 1e6,
    latency:percentile(50) / 1e3, latency:percentile(99) / 1e3,
    errors.connect + errors.read + errors.write + errors.status + errors.timeout
  ))
end
