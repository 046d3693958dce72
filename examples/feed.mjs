// Feed a learner from Node.js: send records with positions, and wait for durable receipts. See docs/guides/live.md.
//
//     npm install @grpc/grpc-js @grpc/proto-loader
//     node feed.mjs 127.0.0.1:7401 ward-3 < records.jsonl
//
// Standard input has one JSON object per line. The number of the line is its position: after a restart with the same input, the
// program continues after the last receipt of the learner.
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

const intake = await new Promise((resolve, reject) =>
  learner.GetIntake({ source }, (error, answer) => (error ? reject(error) : resolve(answer))),
);
const { data } = JSON.parse(intake.spec);
const { features: fields, label } = data.schema;

// The encoding of docs/reference/data.md, for fields of these two types and no missing values.
const scale = ([low, high], value) => {
  if (!(low <= value && value <= high)) throw new Error("a number is outside its bounds");
  return (2 * (value - low)) / (high - low) - 1;
};
const indexOf = (categories, value) => {
  const index = categories.indexOf(value);
  if (index < 0) throw new Error("a value is not one of the categories");
  return index;
};
const encode = (record) => {
  const row = Object.entries(fields).flatMap(([name, field]) => {
    if (field.type === "number") return [scale(field.bounds, record[name])];
    const index = indexOf(field.categories, record[name]);
    return field.categories.map((_, k) => Number(k === index));
  });
  return data.intercept ? [...row, 1] : row;
};
const tensor = (shape, numbers) => ({ shape, dtype: "DATA_TYPE_FLOAT64", data: Buffer.from(Float64Array.from(numbers).buffer) });

const stream = learner.Ingest();
let stored = intake.receipt?.position ?? -1; // the learner has stored all records up to this position
let last = Infinity; // last position of the input, once it is known
const all = new Promise((resolve, reject) => {
  stream.on("error", reject);
  stream.on("data", (receipt) => {
    stored = receipt.position ?? stored;
    if (stored >= last) resolve();
  });
});

const begin = stored + 1;
let position = -1;
for await (const line of createInterface({ input: process.stdin })) {
  position += 1;
  if (position < begin) continue;
  const record = JSON.parse(line);
  const row = encode(record);
  const batch = {
    source,
    features: tensor([1, row.length], row),
    labels: tensor([1], [indexOf(label.categories, record[label.name])]),
    positions: [position],
  };
  if (!stream.write(batch)) await new Promise((resolve) => stream.once("drain", resolve)); // the learner is busy
}
last = position;
if (stored < last) await all;
stream.end();
learner.close();
console.log(`the learner has stored ${last + 1} records`);
