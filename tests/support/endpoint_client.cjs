// The agent of support/endpoint_clients.py with packages for Node: `node endpoint_client.cjs LIBRARY HOW`.
const ORDERS = "You move a counter.";
const QUESTION = "Bring the counter from 0 to 9.";
const messages = [
  { role: "system", content: ORDERS },
  { role: "user", content: QUESTION },
];

const add = {
  type: "function",
  function: {
    name: "add",
    description: "Add a number to the counter.",
    parameters: { type: "object", properties: { n: { type: "integer" } }, required: ["n"] },
    parse: JSON.parse,
    function: ({ n }) => `added ${n}`,
  },
};

async function openai(stream) {
  const OpenAI = require("openai");
  const runner = new OpenAI().chat.completions.runTools({ model: "policy", messages, tools: [add], stream });
  await runner.finalContent();
}

async function vercel(model, stream) {
  const { generateText, streamText, jsonSchema, stepCountIs, tool } = require("ai");
  const { description, parameters, function: execute } = add.function;
  const tools = { add: tool({ description, inputSchema: jsonSchema(parameters), execute }) };
  const asked = { model, system: ORDERS, prompt: QUESTION, tools, stopWhen: stepCountIs(9) };
  if (!stream) return generateText(asked);
  let failure;
  const said = streamText({ ...asked, onError: ({ error }) => (failure = error) });
  for await (const _ of said.fullStream);
  if (failure) throw failure;
}

const clients = {
  openai,
  vercel: (stream) => vercel(require("@ai-sdk/openai").openai("policy"), stream),
  vercel_chat: (stream) => vercel(require("@ai-sdk/openai").openai.chat("policy"), stream),
};

clients[process.argv[2]](process.argv[3] === "stream");
