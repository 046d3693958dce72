// Feeds a learner from Node.js: records with positions, in, and receipts that last, out. See docs/live.md.
//
//     npm install @grpc/grpc-js @grpc/proto-loader
//     node feed.mjs 127.0.0.1:7401 ward-3 < records.jsonl
//
// Standard input has one JSON object a line. The line's number is its position: started again with the same input, the
// program goes on where the learner's last receipt was.
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const PROTO = fileURLToPath(new URL("../proto/", import.meta.url));
const [address, source] = process.argv.slice(2);
const api = grpc.loadPackageDefinition(
  loader.loadSync("sottovoce_wire/v1/learner.proto", { includeDirs: [PROTO], keepCase: true, longs: Number }),
);
const learner = new api.sottovoce_wire.v1.Learner(address, grpc.credentials.createInsecure());

const told = await new Promise((resolve, reject) =>
  learner.Intake({ source }, (error, answer) => (error ? reject(error) : resolve(answer))),
);
const { data } = JSON.parse(told.spec);
const { features: fields, label } = data.schema;

// As docs/schema.md has it, for fields of these two types and no missing values.
const within = ([low, high], value) => {
  if (!(low <= value && value <= high)) throw new Error("a number is beyond its bounds");
  return (2 * (value - low)) / (high - low) - 1;
};
const among = (categories, value) => {
  const found = categories.indexOf(value);
  if (found < 0) throw new Error("a word is no category");
  return found;
};
const encoded = (record) => {
  const row = Object.entries(fields).flatMap(([name, field]) => {
    if (field.type === "number") return [within(field.bounds, record[name])];
    const one = among(field.categories, record[name]);
    return field.categories.map((_, k) => Number(k === one));
  });
  return data.intercept ? [...row, 1] : row;
};
const tensor = (shape, numbers) => ({ shape, dtype: "DATA_TYPE_FLOAT64", data: Buffer.from(Float64Array.from(numbers).buffer) });

const stream = learner.Ingest();
let kept = told.receipt?.position ?? -1; // up to there everything lasts
let last = Infinity; // of the input, once it is known
const all = new Promise((resolve, reject) => {
  stream.on("error", reject);
  stream.on("data", (receipt) => {
    kept = receipt.position ?? kept;
    if (kept >= last) resolve();
  });
});

const begin = kept + 1;
let position = -1;
for await (const line of createInterface({ input: process.stdin })) {
  position += 1;
  if (position < begin) continue;
  const record = JSON.parse(line);
  const row = encoded(record);
  const batch = {
    source,
    features: tensor([1, row.length], row),
    labels: tensor([1], [among(label.categories, record[label.name])]),
    positions: [position],
  };
  if (!stream.write(batch)) await new Promise((resolve) => stream.once("drain", resolve)); // the learner is busy
}
last = position;
if (kept < last) await all;
stream.end();
learner.close();
console.log(`${last + 1} records are in the learner's keeping`);
